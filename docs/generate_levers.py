"""Write the pages docs/levers/*.md: one page a lever, made from the docstring of the lever's module, and an index.

python docs/generate_levers.py            writes the pages and removes those of levers that are gone
python docs/generate_levers.py --check    writes nothing; exits with 1 and names the pages that are out of date
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from generate_rules import markdown, pair, plain, written

from flatout.core import registry
from flatout.core.records.finding import Rule
from flatout.core.records.lever import Lever

FOLDER = Path(__file__).parent / "levers"


def page(lever: Lever, rules: Iterable[Rule]) -> str:
    """The page of one lever."""
    docstring = importlib.import_module(lever.module).__doc__
    if not docstring:
        raise SystemExit(f"{lever.module} has no docstring, so '{lever.id}' has no page; write one as docs/how-to says")
    path = f"src/{lever.module.replace('.', '/')}.py"
    blocks = [
        f"# {plain(lever.title)}",
        f"Lever `{lever.id}`, guarantee {lever.guarantee}, in `{path}`.",
        markdown(docstring),
        in_plans(lever),
    ]
    cured = [f"[`{rule.id}`](../rules/{rule.id}.md)" for rule in rules if lever.id in rule.levers]
    if cured:
        blocks.append(f"It mends what is found by {', '.join(cured)}.")
    blocks.append(pair("levers", lever.id))
    return "\n\n".join(filter(None, blocks)) + "\n"


def in_plans(lever: Lever) -> str:
    """What the commands do with it."""
    if lever.apply is None:
        return (
            "`flatout run --plan` changes the text in memory, before it is compiled; `flatout edit` prints the change."
        )
    if lever.edit is None:
        return "`flatout run --plan` pulls it while the script runs; `flatout edit` leaves it in the plan."
    return "`flatout run --plan` pulls it while the script runs; `flatout edit` prints the change of the text."


def index(levers: Iterable[Lever]) -> str:
    """The list of all levers, branch by branch."""
    lines = [
        "# Levers",
        "",
        "What flatout does to a script, by branch. Each page is the docstring of the lever's module.",
    ]
    for branch, members in groupby(sorted(levers, key=lambda one: one.id), key=lambda one: one.id.partition(".")[0]):
        lines += ["", f"## {branch}", "", "| lever | what it does | guarantee |", "|---|---|---|"]
        lines += [f"| [`{one.id}`]({one.id}.md) | {plain(one.title)} | {one.guarantee} |" for one in members]
    return "\n".join(lines) + "\n"


def main() -> int:
    levers, rules = registry.levers(), registry.rules()
    wanted = {"index.md": index(levers)} | {f"{one.id}.md": page(one, rules) for one in levers}
    return written(FOLDER, wanted, description="Write docs/levers/*.md from the levers' docstrings.")


if __name__ == "__main__":
    sys.exit(main())
