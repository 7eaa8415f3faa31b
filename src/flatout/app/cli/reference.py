"""The page of a rule or a lever on the terminal, by its id or a part of it."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from inspect import cleandoc
from typing import Protocol, TypeVar

from flatout.app.cli.terminal import print_lines
from flatout.core.errors import UsageError


class Documented(Protocol):
    """A rule or a lever: its module's docstring is its page."""

    @property
    def id(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def module(self) -> str: ...


Found = TypeVar("Found", bound=Documented)


def named(name: str, known: Sequence[Found], *, what: str) -> Found:
    """The one with this id, or the only one whose id has this part.

    Raises UsageError where there is none or are several, with those that come nearest.
    """
    exact = [one for one in known if one.id == name]
    partly = [one for one in known if name in one.id]
    if len(exact or partly) == 1:
        return (exact or partly)[0]
    near = [one.id for one in partly] or get_close_matches(name, [one.id for one in known], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"`flatout {what}s` lists all"
    raise UsageError(f"{'several' if partly else 'no'} {what}s are named '{name}'; {hint}")


def print_page(one: Documented, *notes: str) -> None:
    """Print the title, the id, the docstring of its module, and these notes."""
    docstring = cleandoc(importlib.import_module(one.module).__doc__ or "")
    print_lines(one.title, one.id, "", *docstring.splitlines(), *(("", *notes) if notes else ()))


def listed(ids: Iterable[str]) -> str:
    """Some ids as a list in a sentence."""
    return ", ".join(sorted(ids))
