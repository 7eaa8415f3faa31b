"""Puts the doctests of docstrings into fences, so that the pages of the reference show them as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1(?!$).*)*", re.MULTILINE)


class FencedDoctests(griffe.Extension):
    """An extension of mkdocstrings' Python handler; mkdocs.yml names it."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of what was just read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """The text with a fence around each run of lines that begins with `>>>` and goes on to the next empty line."""
    return _DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0]}\n{match[1]}```", text)
