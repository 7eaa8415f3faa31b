"""`flatout levers`: what can be done."""

from __future__ import annotations

from flatout.app.cli.command import Command
from flatout.app.cli.terminal import open_console


def levers() -> None:
    """List the levers: what a plan can do to a script, and what each promises."""
    from rich.table import Table

    from flatout.core.registry import levers as all_levers

    table = Table("lever", "what it does", "guarantee", box=None, header_style="bold", pad_edge=False)
    for lever in all_levers():
        table.add_row(lever.id, lever.title, lever.guarantee)
    open_console().print(table)


COMMAND = Command(levers, order=180)
