"""Reads an HTML report as a browser would, and makes hostile copies of records."""

from __future__ import annotations

import typing
from html.parser import HTMLParser
from typing import Any, Literal

import msgspec

from flatout.core.records.record import Record


def spoiled(value: Any, text: str) -> Any:
    """The record with `text` in every field that may hold any text; fields that hold one of a few words keep theirs."""
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        return tuple(spoiled(v, text) for v in value)
    if isinstance(value, dict):
        return {(f"{k} {text}" if isinstance(k, str) else k): spoiled(v, text) for k, v in value.items()}
    if not isinstance(value, Record):
        return value
    hints = typing.get_type_hints(type(value))
    free = [n for n in value.__struct_fields__ if typing.get_origin(hints[n]) is not Literal]
    return msgspec.structs.replace(value, **{n: spoiled(getattr(value, n), text) for n in free})


class Page(HTMLParser):
    """What a browser would make of the page: elements, attributes and text."""

    def __init__(self, data: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.data: list[str] = []
        self.open: list[str] = []
        self.feed(data.decode("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br", "link", "img", "input", "hr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.data.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.data).split())


_NAMES = """
html head meta title style body a header div span nav main section article footer p h1 h2 h3 h4 ul ol li dl dt dd i b small code
pre table thead tbody tr th td details summary del ins svg g path defs use text tspan clippath rect pattern
"""
ELEMENTS = frozenset(_NAMES.split())
"""All that a page is made of."""


def check_harmless(page: Page) -> None:
    """Nothing in the page can run, or load anything."""
    assert set(page.tags) <= ELEMENTS, set(page.tags) - ELEMENTS
    assert page.open == []
    assert page.tags.count("style") == 1
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name, value)
        assert name not in ("src", "srcset", "srcdoc", "action", "formaction", "xlink:href", "background")
        if name == "href":
            assert value.startswith("#"), (tag, value)
        if name in ("style", "clip-path"):
            assert "url(" not in value.replace("url(#", ""), (tag, value)
            assert "expression" not in value
