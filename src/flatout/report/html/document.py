"""Any report as one HTML page: a section for each heading, fold, figure and titled table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flatout.report.document import Block, Drawing, Fold, Heading, Table
from flatout.report.html.template import rendered_page


class Section(NamedTuple):
    """A part of a page with its heading, and what stands in it."""

    title: str
    blocks: list[Block]


def document_page(blocks: Iterable[Block], *, command: str = "") -> bytes:
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
            case Drawing() | Table() if block.title:
                sections.append(Section(block.title, [block]))
            case _:
                sections[-1].blocks.append(block)
    return rendered_page(
        "document", filters={"kind": kind_of_block}, headline=title.text, sections=sections, command=command
    )


def kind_of_block(block: object) -> str:
    """The name of a block's or a cell's type, which templates draw by."""
    return type(block).__name__
