"""`flatout rules`: what is looked for."""

from __future__ import annotations

from flatout.app.cli.command import Command
from flatout.app.cli.terminal import open_console


def rules() -> None:
    """List the rules: what `flatout check` looks for."""
    from rich.table import Table

    from flatout.core.registry import rules as all_rules

    table = Table("rule", "what it finds", box=None, header_style="bold", pad_edge=False)
    for rule in all_rules():
        table.add_row(rule.id, rule.title)
    open_console().print(table)


COMMAND = Command(rules, order=120)
