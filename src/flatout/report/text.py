"""Reports on a terminal: every kind of block, at most as wide as is easy to read. Text of a script is shown inert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text

from flatout.core import units
from flatout.report.bars import PhaseBar
from flatout.report.document import Block, Cause, Cell, Column, Drawing, Fold, Heading, Listing, Phases, Table
from flatout.report.sanitise import CodeText, Words

_WIDTH: Final = 100
"""Columns at most: longer lines are harder to read."""
_INSET: Final = (0, 0, 0, 2)
_ENDLESS: Final = 1 << 14
"""Columns of a terminal on which no line is wrapped."""


def terminal_report(blocks: Iterable[Block], *, width: int = _WIDTH) -> RenderableType:
    """All blocks for a console of rich, at most `width` columns wide; plain ASCII where its encoding is not UTF-8."""
    return Constrain(Group(*(_drawn(block) for block in blocks)), width=width)


def plain_text(blocks: Iterable[Block], *, width: int = _WIDTH) -> str:
    """The report as plain text, `width` columns wide."""
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as captured:
        console.print(terminal_report(blocks, width=width))
    return captured.get()


def plain_lines(blocks: Iterable[Block]) -> list[str]:
    """The report as lines of plain text that are never wrapped."""
    return [line.rstrip() for line in plain_text(blocks, width=_ENDLESS).splitlines()]


def _drawn(block: Block) -> RenderableType:
    match block:
        case Heading(text, style):
            return Words(text, style=style)
        case Table():
            below = [Words(line, style="dim") for line in block.rest]
            return Padding(Group(_RoomyTable(block), *below), (0, 0, 0, block.inset))
        case Listing():
            return _listing(block)
        case Phases(seconds):
            return Padding(PhaseBar(seconds), _INSET)
        case Cause():
            return _cause(block)
        case Fold(title, blocks, brief):
            return Group(*map(_drawn, brief or (Heading(title), *blocks)))
        case Drawing():
            return Group()
        case str():
            return Words(block)
        case Words():
            return block


class _RoomyTable(NamedTuple):
    """A table that drops columns, never digits, when there is little room."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.table.columns
        at = [index for index, column in enumerate(columns) if options.max_width >= column.from_width]
        grid = _grid([columns[index] for index in at], gap=2 if options.max_width >= self.table.roomy_from else 1)
        for row in self.table.rows:
            grid.add_row(*(_cell(row[index]) for index in at))
        yield grid


def _grid(columns: Sequence[Column], *, gap: int = 2) -> Grid:
    has_heads = any(column.head for column in columns)
    grid = Grid(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim", show_header=has_heads)
    for column in columns:
        grid.add_column(
            column.head,
            justify="right" if column.is_number else "left",
            no_wrap=column.is_number or column.is_whole,
            overflow="fold",
            style=column.style,
        )
    return grid


def _cell(cell: Cell) -> RenderableType:
    if isinstance(cell, list):
        return Group(*map(_cell, cell))
    return Words(cell) if isinstance(cell, str) else cell


def _listing(listing: Listing) -> RenderableType:
    grid = _grid([Column(style="dim", is_whole=True), Column()])
    before = ""
    for label, words in listing.items:
        grid.add_row("" if label == before else label, _cell(words))
        before = label
    return Padding(grid, (0, 0, 0, listing.inset))


class _Arrow:
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("->" if options.ascii_only else "\u2192", style="green")


def _cause(cause: Cause) -> RenderableType:
    """The cause and its gain; where; the line; what it costs; why; what to change."""
    finding = cause.finding
    head = Grid.grid(expand=True, padding=(0, 2, 0, 0))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True, overflow="fold")
    head.add_row(Words(finding.title, style="bold"), Text(" ".join(filter(None, cause.gain)), style="bold green"))
    body: list[RenderableType] = [head, _where(cause)]
    if cause.code:
        body.append(Padding(CodeText(cause.code), _INSET))
    cost = f"{cause.cost}; gain {units.BASIS[finding.basis]}" if cause.cost else ""
    body += map(Words, filter(None, (cost, *cause.memory)))
    if finding.because:
        body.append(Words(finding.because))
    if finding.edit.strip():
        body.append(_edit(finding.edit))
    tail = [finding.rule]
    if cause.also:
        tail.append("also at " + ", ".join(cause.also))
    if finding.merged:
        tail.append("also seen as " + ", ".join(finding.merged))
    body.append(Words("; ".join(tail), style="dim"))
    numbered = Grid.grid(padding=(0, 2, 0, 0), expand=True)
    numbered.add_column(justify="right", width=2)
    numbered.add_column(ratio=1)
    numbered.add_row(Text(str(cause.number), style="bold"), Group(*body))
    return numbered


def _where(cause: Cause) -> RenderableType:
    if not cause.where:
        return Words("the whole step, no single line", style="cyan")
    module = cause.finding.module
    row = _grid([Column(), Column()])
    row.add_row(Words(cause.where, style="cyan"), Words(f"in module {module}" if module else "", style="dim"))
    return row


def _edit(edit: str) -> RenderableType:
    """The change, after an arrow; lines of code keep their indentation."""
    lines = [line.expandtabs(4) for line in edit.splitlines() if line.strip()]
    shown = [Padding(Words(line), (0, 0, 0, min(40, len(line) - len(line.lstrip())))) for line in lines]
    row = Grid.grid(padding=(0, 1, 0, 0))
    row.add_column(width=2)
    row.add_column(ratio=1)
    row.add_row(_Arrow(), Group(*shown))
    return row
