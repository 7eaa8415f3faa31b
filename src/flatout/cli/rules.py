"""`flatout rules`: what is looked for."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def rules() -> None:
    """List the rules: what `flatout check` looks for."""
    from flatout.registry import rules as all_rules

    table = Table("rule", "what it finds", box=None, header_style="bold", pad_edge=False)
    for rule in all_rules():
        table.add_row(rule.id, rule.title)
    Console().print(table)
