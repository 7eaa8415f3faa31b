"""Any report as one HTML page: a section for each heading, fold, figure and titled table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from flatout.report.document import Block, Cell, Drawing, Fold, Heading, Table
from flatout.report.html.bars import BARS, Chart, css_width
from flatout.report.html.template import rendered_page

_SHORT: Final = 14
"""Letters of a cell that stand on one line."""
_SENTENCE: Final = 30


class Section(NamedTuple):
    """A part of a page with its heading, and what stands in it."""

    title: str
    blocks: list[Block | Chart]


def document_page(blocks: Iterable[Block | Chart], *, command: str = "") -> bytes:
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
            case Drawing() | Chart() | Table() if block.title:
                sections.append(Section(block.title, [block]))
            case _:
                sections[-1].blocks.append(block)
    return rendered_page(
        "document",
        sheets=("style", BARS),
        filters={"kind": kind_of_block, "css_width": css_width, "cell_style": cell_style},
        headline=title.text,
        sections=sections,
        command=command,
    )


def cell_style(table: Table, number: int) -> str:
    """The class of a column's cells, by their longest text: whether it may take several lines, on a least width or none."""
    if table.columns[number].is_whole:
        return "line"
    longest = max((len(_text(row[number])) for row in table.rows), default=0)
    return "prose" if longest > _SENTENCE else "words" if longest > _SHORT else "line"


def _text(cell: Cell) -> str:
    if isinstance(cell, list):
        return " ".join(map(_text, cell))
    return cell if isinstance(cell, str) else cell.text


def kind_of_block(block: object) -> str:
    """The name of a block's or a cell's type, which templates draw by."""
    return type(block).__name__
