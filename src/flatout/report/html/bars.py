"""Bars of one scale that a template draws as HTML, so that names and values stay readable on any screen."""

from __future__ import annotations

from typing import NamedTuple

BARS = "bars"
"""The style sheet of such charts."""


class Piece(NamedTuple):
    """A part of a bar: a class of the style, what it says when it is pointed at, and its length as a fraction of its bar."""

    style: str
    tip: str
    fraction: float


class Bar(NamedTuple):
    """A line of the chart. Fractions are of the chart's width."""

    name: str
    value: str
    pieces: tuple[Piece, ...]
    fraction: float
    label: str
    remark: str = ""
    interval: tuple[float, float] | None = None
    is_over: bool = False
    num_before: int = 0
    """Lines that are left out above it."""


class Chart(NamedTuple):
    """Bars, the colours in them, and where the limit is drawn, if there is one."""

    bars: tuple[Bar, ...]
    legend: tuple[tuple[str, str], ...] = ()
    limit: float | None = None
    title: str = ""
    """Its heading, on pages that give each figure a section."""


def css_width(fraction: float) -> str:
    """A fraction of the chart's width in the style's words.

    >>> css_width(0.5)
    '50.000%'
    """
    return f"{100 * fraction:.3f}%"
