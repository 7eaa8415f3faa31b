"""Write docs/benchmarks.md: each claim with its figures from the stored result, the hardware, the date, the command and the file.

python docs/generate_benchmarks.py            writes the page
python docs/generate_benchmarks.py --check    writes nothing; exits with 1 when the page is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from benchmark_claims import SECTIONS, Claim, Run, Table
from generate_results import HARDWARE, RESULTS, ROOT, described, script_of, write_or_check

PAGE: Final = ROOT / "docs" / "benchmarks.md"
HEAD: Final = """\
# Benchmarks

Each figure on this page is read from a stored result when the page is generated. Beside it stand the hardware, the date, and
the command that measures it again; results are in `bench/results`. [All results](results.md) lists those that are not here, too.
Scripts that other people wrote have pages of their own: [checked](world/index.md) and [tuned](world/tune.md).
"""


def stored(pattern: str) -> tuple[list[Path], Any]:
    """The files of a result, and what they hold: JSON, JSON by lines, or for a pattern that by the files' names."""
    if "*" in pattern:
        paths = sorted(RESULTS.glob(pattern))
        return paths, {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    path = RESULTS / pattern
    text = path.read_text(encoding="utf-8")
    try:
        return [path], json.loads(text)
    except json.JSONDecodeError:
        return [path], [json.loads(line) for line in text.splitlines() if line.strip()]


def run_lines(run: Run) -> list[str]:
    """What one run showed, as Markdown."""
    paths, result = stored(run.result)
    if not paths:
        raise SystemExit(f"bench/results/{run.result} does not exist; docs/benchmark_claims.py names it")
    folder = run.result.partition("/")[0]
    command = run.command or described(script_of(paths[0]))[1]
    hardware = HARDWARE.get(folder[11:], folder[11:])
    lines = [f"**{hardware}, {folder[:10]}** (`bench/results/{run.result}`)", "", "```text", command, "```", ""]
    for one in run.says:
        try:
            lines += table_lines(one, result) if isinstance(one, Table) else claim_lines(one, result)
        except (KeyError, IndexError, TypeError) as e:
            raise SystemExit(
                f"bench/results/{run.result} does not hold what docs/benchmark_claims.py reads: {e!r}"
            ) from e
    return [*lines, ""] if lines[-1] else lines


def claim_lines(claim: Claim, result: Any) -> list[str]:
    """A sentence as an item of a list."""
    text = claim.text.format_map(claim.values(result))
    return [
        fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    ]


def table_lines(table: Table, result: Any) -> list[str]:
    """A table, with empty lines around it."""
    head = ["", f"| {' | '.join(table.head)} |", f"|{'---|' * len(table.head)}"]
    return [*head, *(f"| {' | '.join(row)} |" for row in table.rows(result)), ""]


def page() -> str:
    """The page as Markdown."""
    lines = [HEAD]
    for section in SECTIONS:
        lines += [f"## {section.title}", ""]
        lines += [section.intro, ""] if section.intro else []
        for run in section.runs:
            lines += run_lines(run)
    return "\n".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, page()))
