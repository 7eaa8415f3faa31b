"""A report as blocks. Parts build them from records; the terminal, Markdown and HTML each draw every kind of block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from flatout.core.records.finding import RankedFinding
from flatout.report.sanitise import CodeText, Path, Words

NEVER: Final = 1 << 30
"""As a column's `from_width`: a terminal leaves the column out, Markdown and HTML show it."""

Inline = str | Words | CodeText | Path
Cell = Inline | list[Inline]
"""What stands in a table: one piece of text, or several, each on a line of its own."""


class Column(NamedTuple):
    """A column of a table: its head ('' for none) and how its cells are set."""

    head: str = ""
    is_number: bool = False
    """Set to the right, on one line."""
    is_whole: bool = False
    """Set to the left, on one line."""
    style: str = ""
    from_width: int = 0
    """Columns of the terminal from which it is shown."""


class Table(NamedTuple):
    """Rows of cells, `inset` blanks from the left; `rest` stands below it, a line each."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    rest: Sequence[str] = ()
    inset: int = 2
    roomy_from: int = 0
    """Columns of the terminal from which two blanks stand between columns, not one."""
    title: str = ""
    """Its heading on a page."""


class Heading(NamedTuple):
    """The heading of a section, or as `is_title` the answer that the whole report gives; `style` is one of rich."""

    text: str
    style: str = "bold"
    is_title: bool = False


class Listing(NamedTuple):
    """Remarks, each with a label or ''; labels that follow one another are shown once."""

    items: Sequence[tuple[str, Inline]]
    inset: int = 0


class Phases(NamedTuple):
    """Seconds of a step by phase, as one stacked bar or one row of a table."""

    seconds: Mapping[str, float]


class Cause(NamedTuple):
    """A finding with its number, its place and the code there, what is at stake ('1.3x - 1.4x', 'faster'), what it costs in time
    ('' for nothing) and in memory, a sentence each, and further places."""

    number: int
    finding: RankedFinding
    where: str
    code: str
    gain: tuple[str, str]
    cost: str
    memory: tuple[str, ...]
    also: tuple[str, ...]


class Drawing(NamedTuple):
    """A figure as SVG, which only HTML shows; `title` is its heading."""

    svg: str
    title: str


class Fold(NamedTuple):
    """What Markdown folds away under a title; a terminal shows `brief` in its place, where there is that."""

    title: str
    blocks: Sequence[Block]
    brief: Sequence[Block] = ()


Block = str | Words | Heading | Table | Listing | Phases | Cause | Drawing | Fold
"""A part of a report, in the order of reading; '' is an empty line on a terminal and nothing elsewhere."""


def numbers(*heads: str) -> tuple[Column, ...]:
    """Columns of numbers with these heads."""
    return tuple(Column(head, is_number=True) for head in heads)
