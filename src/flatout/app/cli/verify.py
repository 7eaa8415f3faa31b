"""`flatout verify`: is a changed script equal to the one before, and faster?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import Allow, ModuleName, ReportJunit, require_writable, target_of
from flatout.app.cli.terminal import open_console, print_report


def verify(
    before: Annotated[
        Path,
        typer.Argument(metavar="BEFORE", help="The script as it was; or a plan (.toml) for the script that follows."),
    ],
    after: Annotated[
        str | None, typer.Argument(metavar="AFTER", help="The script as it is now, or that of the plan.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of both scripts, after `--`.")
    ] = None,
    module: ModuleName = None,
    allow: Allow = "bounded",
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="PRECISION",
            help="Whose rounding counts: float64, float32, tf32, float16, bfloat16. Else the script's, or the plan's.",
        ),
    ] = "",
    steps: Annotated[int, typer.Option(help="How many steps are compared.")] = 8,
    seconds: Annotated[float, typer.Option(help="How long to race the two, in all.")] = 15.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds a process may take for its start or its first steps.")
    ] = 300.0,
    seed: Annotated[int, typer.Option(help="Moves all seeds that the scripts set.")] = 0,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Compare only, do not race.")] = False,
    no_equality: Annotated[
        bool, typer.Option("--no-equality", help="Race only; what is computed is not compared, and nothing proved.")
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the verdict to this file.")] = None,
    junit: ReportJunit = None,
) -> None:
    """Run both scripts step by step in processes of their own, compare losses, gradients and parameters, and race them.

    Exits with 0 when AFTER is proved equal and faster, with 1 when it is different or slower, with 3 when that cannot be told.
    """
    from flatout.app.verify_script import VerifyOptions, prove_target
    from flatout.core.files import STANDARD_OUTPUT, write_all_files
    from flatout.core.records.record import to_json
    from flatout.report.junit import junit_report
    from flatout.report.parts.verdict import verdict_blocks, verdict_cases

    require_writable(json=json, junit=junit)
    target = target_of(after, module, arguments, example="`flatout verify before.py after.py`")
    options = VerifyOptions(allow, at, steps, seconds, timeout, seed, no_speed, no_equality)
    with open_console(stderr=True).status("starting") as line:
        verdict = prove_target(before, target, options, dashes="--", on_progress=line.update)
    print_report(verdict_blocks(verdict), stderr=STANDARD_OUTPUT in (json, junit))
    wanted = (
        (json, lambda: to_json(verdict)),
        (junit, lambda: junit_report("flatout.verify", verdict_cases(verdict))),
    )
    write_all_files((path, content) for path, content in wanted if path is not None)
    sys.stdout.flush()
    raise typer.Exit(verdict.exit_code)


COMMAND = Command(
    verify,
    order=140,
    group="prove",
    takes_script=True,
    examples=("flatout verify train.py train_fast.py", "flatout verify --json verdict.json plan.toml train.py"),
)
