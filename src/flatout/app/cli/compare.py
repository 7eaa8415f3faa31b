"""`flatout compare`: what changed between two checked runs, and whether it is slower."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import ReportJunit, require_writable
from flatout.app.cli.terminal import open_console, print_report
from flatout.core.errors import RecordError, UsageError

if TYPE_CHECKING:
    from flatout.core.records.evidence import Evidence


def compare(
    before: Annotated[
        Path, typer.Argument(metavar="BEFORE", help="What `flatout check --json` wrote of the run before.")
    ],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The same of the run after.")],
    fail_if_slower: Annotated[
        str | None,
        typer.Option(metavar="FRACTION", help="Exit with 1 when the step is slower by more than this: 5% or 0.05."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the comparison to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write it as Markdown to this file.")
    ] = None,
    junit: ReportJunit = None,
    github: Annotated[
        bool, typer.Option("--github", help="Print what became slower as annotations of GitHub Actions, too.")
    ] = False,
) -> None:
    """Say what changed between two checked runs, line by line: step time, phases, findings, lines, memory."""
    from flatout.app.session import compare_runs
    from flatout.core.files import STANDARD_OUTPUT, write_all_files
    from flatout.core.records.record import to_json
    from flatout.report.github import github_annotations
    from flatout.report.junit import junit_report
    from flatout.report.markdown import markdown_report
    from flatout.report.parts.ci import comparison_annotations, comparison_cases
    from flatout.report.parts.compare import comparison_blocks, decision_line

    require_writable(json=json, markdown=markdown, junit=junit)
    threshold = None if fail_if_slower is None else _fraction(fail_if_slower)
    one, two = _read(before), _read(after)
    comparison = compare_runs(one, two, fail_if_slower=threshold)
    answer, *blocks = comparison_blocks(comparison)
    takes_stdout = STANDARD_OUTPUT in (json, markdown, junit)
    print_report([answer, *blocks], stderr=takes_stdout)
    decision = [decision_line(comparison)] if comparison.decision is not None else []
    wanted = (
        (json, lambda: to_json(comparison)),
        (markdown, lambda: markdown_report([answer, *decision, *blocks]).encode()),
        (junit, lambda: junit_report("flatout.compare", comparison_cases(comparison))),
    )
    write_all_files((path, content) for path, content in wanted if path is not None)
    if github:
        root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd())
        remarks = comparison_annotations(comparison, file_in=lambda file: _file_in(root, two.workload.cwd, file))
        print(github_annotations(remarks), end="", file=sys.stderr if takes_stdout else sys.stdout)
    for line in decision:
        open_console(stderr=takes_stdout).print(line, style="bold", markup=False, highlight=False, soft_wrap=True)
    if comparison.decision is not None and comparison.decision.outcome == "slower":
        raise typer.Exit(1)


def _read(path: Path) -> Evidence:
    from flatout.report.json_report import read_evidence

    try:
        return read_evidence(path.read_bytes())
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; give the file that --json wrote") from e
    except RecordError as e:
        raise RecordError(f"'{path}': {e}") from e


def _file_in(root: Path, cwd: str, file: str) -> str:
    """The path within the repository at `root` of a file as the script in `cwd` names it; '' for one outside.

    A run of another machine, or of a folder that is gone, is taken to have started at the root.
    """
    path = Path(cwd, file)
    for folder in (root, root.resolve()):
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return "" if os.path.isabs(file) else file


def _fraction(text: str) -> float:
    """The threshold as a fraction: '5%', '5 %' and '0.05' are the same."""
    number = text.strip()
    is_percent = number.endswith("%")
    try:
        value = float(number.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f"--fail-if-slower {text} is no share of 0 or more; write 5% or 0.05")
    if value >= 1 and not is_percent:
        raise UsageError(f"--fail-if-slower {text} would be {100 * value:g} %; write {text}% or {100 * value:g}%")
    return value


COMMAND = Command(
    compare,
    order=110,
    group="find",
    examples=(
        "flatout compare before.json after.json",
        "flatout compare before.json after.json --fail-if-slower 5% --github",
    ),
)
