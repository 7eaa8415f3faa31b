"""The phases of a step as one stacked bar with a legend; told apart by fill as well as by colour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from flatout.core.units import percent, time_unit
from flatout.report.sanitise import inert

_TWO_COLUMNS: Final = 74
"""Columns from which the legend stands in two columns."""


class Look(NamedTuple):
    """How one phase is named and drawn."""

    label: str
    fill: str
    ascii_fill: str
    colour: str


LOOKS: Final[Mapping[str, Look]] = {
    "data": Look("waiting for data", "\u2591", ".", "yellow"),
    "transfer": Look("transfer", "\u2571", "/", "magenta"),
    "environment": Look("environment", "\u2503", "e", "bright_yellow"),
    "rollout": Look("rollout", "\u2572", "r", "bright_blue"),
    "no_grad": Look("forward without gradients", "\u2573", "n", "bright_cyan"),
    "forward": Look("forward", "\u2588", "#", "blue"),
    "backward": Look("backward", "\u2593", "=", "cyan"),
    "optimizer": Look("optimizer", "\u2592", "+", "green"),
    "evaluation": Look("evaluation", "\u259a", "%", "bright_black"),
    "compile": Look("compiling", "\u259e", "*", "bright_red"),
    "other": Look("other host work", "\u00b7", "-", "red"),
}


def phase_label(name: str) -> str:
    """A phase as it is called; the name of one that nobody knows."""
    return LOOKS[name].label if name in LOOKS else name


def phases_in_order(phases: Mapping[str, float]) -> dict[str, float]:
    """The phases that take time, in the order of a step."""
    names = [*LOOKS, *(name for name in phases if name not in LOOKS)]
    return {name: phases[name] for name in names if phases.get(name, 0.0) > 0}


class PhaseBar:
    """`phases` is seconds by phase; phases that take no time are left out. Draws nothing when there is none."""

    def __init__(self, phases: Mapping[str, float]) -> None:
        self.phases = phases_in_order(phases)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.phases:
            return
        looks = {name: LOOKS.get(name, Look(inert(name, ascii_only=True), "?", "?", "white")) for name in self.phases}
        fills = {name: look.ascii_fill if options.ascii_only else look.fill for name, look in looks.items()}
        bar = Text(no_wrap=True)
        for name, num_cells in zip(
            self.phases, _cells(list(self.phases.values()), width=options.max_width), strict=True
        ):
            bar.append(fills[name] * num_cells, style=looks[name].colour)
        yield bar

        total = sum(self.phases.values())
        unit = time_unit(total)
        entries = [
            (
                Text(fills[name], style=looks[name].colour),
                Text(looks[name].label),
                f"{unit.show(seconds)} {unit.name}",
                Text(percent(seconds / total), style="dim"),
            )
            for name, seconds in self.phases.items()
        ]
        yield _legend(entries, num_columns=2 if options.max_width >= _TWO_COLUMNS else 1)


def _legend(entries: list[tuple[Text, Text, str, Text]], *, num_columns: int) -> Table:
    """Entries in columns, read downwards."""
    table = Table.grid(padding=(0, 1))
    for _ in range(num_columns):
        table.add_column()
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True, overflow="fold")
        table.add_column(justify="right", no_wrap=True, overflow="fold")
        table.add_column(width=4)
    num_rows = -(-len(entries) // num_columns)
    for row in range(num_rows):
        table.add_row(*(cell for entry in entries[row::num_rows] for cell in (*entry, "")))
    return table


def _cells(values: list[float], *, width: int) -> list[int]:
    """Share `width` cells among positive values, exactly; nobody who is due half a cell or more gets none."""
    total = sum(values)
    exact = [value / total * width for value in values]
    cells = [max(int(share), 1 if share >= 0.5 else 0) for share in exact]
    while sum(cells) < width:
        owed = [share - have for share, have in zip(exact, cells, strict=True)]
        cells[owed.index(max(owed))] += 1
    while sum(cells) > width:
        cells[cells.index(max(cells))] -= 1
    return cells
