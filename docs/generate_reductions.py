"""Write the pages docs/reductions/*.md: one page a reduction, made from the docstring of its module, and an index.

python docs/generate_reductions.py            writes the pages and removes those of reductions that are gone
python docs/generate_reductions.py --check    writes nothing; exits with 1 and names the pages that are out of date
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from generate_rules import markdown, plain, written

from flatout.core import registry
from flatout.core.records.reduction import KINDS, Reduction

FOLDER = Path(__file__).parent / "reductions"


def page(reduction: Reduction) -> str:
    """The page of one reduction."""
    docstring = importlib.import_module(reduction.module).__doc__
    if not docstring:
        raise SystemExit(f"{reduction.module} has no docstring, so '{reduction.id}' has no page; write one")
    path = f"src/{reduction.module.replace('.', '/')}.py"
    blocks = [
        f"# {plain(reduction.title)}",
        f"Reduction `{reduction.id}`, guarantee {reduction.guarantee}, in `{path}`.",
        markdown(docstring),
        "`flatout shrink` tries it on a model, alone and in compositions, and measures what it gains and costs.",
    ]
    return "\n\n".join(blocks) + "\n"


def index(reductions: Iterable[Reduction]) -> str:
    """The list of all reductions, kind by kind, in the order in which they come into a composition."""
    lines = [
        "# Reductions",
        "",
        "What makes a model cheaper, by kind. Each page is the docstring of the reduction's module.",
    ]
    for kind, members in groupby(sorted(reductions, key=lambda r: (KINDS.index(r.kind), r.id)), key=lambda r: r.kind):
        lines += ["", f"## {kind}", "", "| reduction | what it does | guarantee |", "|---|---|---|"]
        lines += [f"| [`{one.id}`]({one.id}.md) | {plain(one.title)} | {one.guarantee} |" for one in members]
    return "\n".join(lines) + "\n"


def main() -> int:
    """The exit status: 1 where --check finds pages that are out of date."""
    reductions = registry.reductions()
    wanted = {"index.md": index(reductions)} | {f"{one.id}.md": page(one) for one in reductions}
    return written(FOLDER, wanted, description="Write docs/reductions/*.md from the reductions' docstrings.")


if __name__ == "__main__":
    sys.exit(main())
