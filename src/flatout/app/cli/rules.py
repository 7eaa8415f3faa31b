"""`flatout rules`: what is looked for."""

from __future__ import annotations

from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.terminal import open_console


def rules(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A rule's id or a part of it: print its page.")
    ] = None,
) -> None:
    """List the rules, which are what `flatout check` looks for, or print the page of one."""
    from rich.table import Table

    from flatout.app.cli.reference import named, print_page
    from flatout.core.registry import rules as all_rules

    if name is not None:
        print_page(named(name, all_rules(), what="rule"))
        return
    table = Table("rule", "what it finds", box=None, header_style="bold", pad_edge=False)
    for rule in all_rules():
        table.add_row(rule.id, rule.title)
    open_console().print(table)


COMMAND = Command(
    rules,
    order=120,
    group="find",
    examples=("flatout rules", "flatout rules overhead.not-compiled"),
)
