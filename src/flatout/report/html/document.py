"""Any report as one HTML page: a section for each heading, fold, figure and titled table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from markupsafe import Markup, escape

from flatout.report.document import Block, Cell, Drawing, Fold, Heading, Table
from flatout.report.html.bars import BARS, Chart, css_width
from flatout.report.html.template import rendered_page
from flatout.report.sanitise import inert_code

_SHORT: Final = 14
"""Letters of a cell that stand on one line."""
_SENTENCE: Final = 30


class CodeLines(NamedTuple):
    """Lines of code as they stand, with their heading; `is_diff` colours what comes in and what goes."""

    title: str
    lines: tuple[str, ...]
    is_diff: bool = False


class Section(NamedTuple):
    """A part of a page with its heading, and what stands in it."""

    title: str
    blocks: list[PageBlock]


PageBlock = Block | Chart | CodeLines


def document_page(blocks: Iterable[PageBlock], *, command: str = "") -> bytes:
    """One HTML file (UTF-8) of all blocks; the first is the title, `command` is what was run."""
    title, *rest = blocks
    assert isinstance(title, Heading)
    sections = [Section("", [])]
    for block in rest:
        match block:
            case Heading(text):
                sections.append(Section(text, []))
            case Fold(text, folded):
                sections.append(Section(text, list(folded)))
            case Drawing() | Chart() | CodeLines() | Table() if block.title:
                sections.append(Section(block.title, [block]))
            case _:
                sections[-1].blocks.append(block)
    return rendered_page(
        "document",
        sheets=("style", BARS),
        filters={"kind": kind_of_block, "css_width": css_width, "cell_style": cell_style, "code_line": code_line},
        headline=title.text,
        sections=sections,
        command=command,
    )


def cell_style(table: Table, number: int) -> str:
    """The class of a column's cells, by their longest text: whether it may take several lines, on a least width or none."""
    if table.columns[number].is_whole:
        return "line"
    longest = max((len(_text(row[number])) for row in table.rows), default=0)
    return "prose" if longest > _SENTENCE else "wraps" if longest > _SHORT else "line"


def _text(cell: Cell) -> str:
    if isinstance(cell, list):
        return " ".join(map(_text, cell))
    return cell if isinstance(cell, str) else cell.text


def code_line(line: str) -> Markup:
    """A line of code as text that cannot become markup, its blanks as they stand."""
    return escape(inert_code(line))


def kind_of_block(block: object) -> str:
    """The name of a block's or a cell's type, which templates draw by."""
    return type(block).__name__
