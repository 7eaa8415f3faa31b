"""`flatout levers`: what can be done."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.terminal import open_console


def levers(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A lever's id or a part of it: print its page.")
    ] = None,
) -> None:
    """List the levers, which are what a plan can change, with the guarantee of each, or print the page of one."""
    from rich.table import Table

    from flatout.app.cli.reference import listed, named, print_page
    from flatout.core.registry import levers as all_levers
    from flatout.core.registry import rules as all_rules

    if name is not None:
        lever = named(name, all_levers(), what="lever")
        cured = [rule.id for rule in all_rules() if lever.id in rule.levers]
        print_page(lever, *([f"Rules that name it as a cure: {listed(cured)}"] if cured else []))
        return
    table = Table("lever", "what it does", "guarantee", box=None, header_style="bold", pad_edge=False)
    for lever in all_levers():
        table.add_row(lever.id, lever.title, lever.guarantee)
    open_console().print(table)


COMMAND = Command(
    levers,
    order=180,
    group="fix",
    examples=("flatout levers", "flatout levers parallelism.fused-optimizer"),
)
