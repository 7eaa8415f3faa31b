"""`flatout doctor`: what works on this machine, and what is missing where something does not."""

from __future__ import annotations

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.terminal import open_console


def doctor() -> None:
    """Say what of flatout works on this machine, and what to do where something does not; exits with 1 where nothing can work."""
    from rich.table import Table
    from rich.text import Text

    from flatout.machine.measure.abilities import abilities

    found = list(abilities())
    table = Table("", "", "", box=None, show_header=False, pad_edge=False)
    for one in found:
        state, style = ("ok", "green") if one.works else ("missing", "red") if one.is_needed else ("no", "yellow")
        table.add_row(one.name, Text(state, style=style), Text(one.text))
    open_console().print(table)
    if not all(one.works for one in found if one.is_needed):
        raise typer.Exit(1)


COMMAND = Command(
    doctor,
    order=25,
    group="find",
    examples=("flatout doctor", "flatout doctor > machine.txt"),
)
