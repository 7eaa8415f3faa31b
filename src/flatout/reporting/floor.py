"""The hot lines against the roofline, as a table that drops columns, never digits, when there is little room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

from flatout.records.finding import HotLine
from flatout.reporting import units
from flatout.reporting.inert import Path, Words, place_of

_NUM_SHOWN: Final = 12
_ROOMY: Final = 95
"""Columns from which two blanks stand between columns."""
_NARROW: Final = 70
"""Columns below which FLOP and bytes are left out."""
_FAR: Final = 999.0
"""Above this many times the floor the figure says only that the line's work is next to nothing."""


class HotLines:
    """`has_floor` is False when the ceilings of the machine are not known; paths are shown relative to `cwd`."""

    def __init__(self, lines: tuple[HotLine, ...], *, has_floor: bool, cwd: str) -> None:
        self.lines = lines[:_NUM_SHOWN]
        self.rest = lines[_NUM_SHOWN:]
        self.has_floor = has_floor
        self.cwd = cwd

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.lines:
            return
        unit = units.time_unit(max(line.seconds for line in self.lines), digits=4)
        headers = ["line", unit.name, "Python", "floor", "of floor", "FLOP", "bytes", "FLOP/B", "bound by"]
        shown = [i for i in range(len(headers)) if options.max_width >= _NARROW or i not in (5, 6, 7)]
        gap = 2 if options.max_width >= _ROOMY else 1
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
        for i in shown:
            is_text = i in (0, len(headers) - 1)
            table.add_column(
                headers[i],
                justify="left" if is_text else "right",
                no_wrap=i > 0,
                overflow="fold",
                min_width=16 if i == 0 else None,
            )
        for line in self.lines:
            cells = list(self._cells(line, unit=unit))
            table.add_row(*(cells[i] for i in shown))
        yield table
        if self.rest:
            num = len(self.rest)
            left = units.duration(sum(line.seconds for line in self.rest))
            yield Words(f"and {num} more {'line' if num == 1 else 'lines'}, {left} together", style="dim")
        if not self.has_floor:
            yield Words("no floor: the ceilings of this machine are not known", style="dim")

    def _cells(self, line: HotLine, *, unit: units.TimeUnit) -> Iterator[RenderableType]:
        has_floor = self.has_floor and line.floor_s > 0
        yield Path(place_of(line.source, cwd=self.cwd), style="cyan")
        yield unit.show(line.seconds)
        yield unit.show(line.python_s)
        yield unit.show(line.floor_s) if has_floor else units.UNKNOWN
        yield _of_floor(line.seconds / line.floor_s) if has_floor else units.UNKNOWN
        yield units.work(line.flop).removesuffix("FLOP").rstrip()
        yield units.size(line.bytes)
        yield units.number(line.intensity)
        yield line.regime if has_floor else units.UNKNOWN


def _of_floor(ratio: float) -> str:
    return f">{_FAR:.0f}x" if ratio > _FAR else f"{units.number(ratio)}x"
