"""`flatout survive`: a script on several ranks that goes on when any of them dies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.children.layout_rank import ranks_of
from flatout.app.cli.command import Command
from flatout.app.cli.options import Arguments, ModuleName, require_writable, target_of
from flatout.app.targets import ScriptTarget


def survive(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to torchrun.")
    ] = None,
    arguments: Arguments = None,
    nproc: Annotated[int, typer.Option(metavar="N", help="Ranks, one for each GPU.")] = 1,
    spares: Annotated[int, typer.Option(help="Device slots (GPUs) beyond those, for ones that keep failing.")] = 0,
    hang: Annotated[float, typer.Option(help="Seconds without a step of a rank after which it hangs.")] = 300.0,
    start: Annotated[float, typer.Option(help="Seconds that the first step of a start may take.")] = 1800.0,
    least_ranks: Annotated[
        int | None, typer.Option(help="Go on with fewer ranks, down to so many. [default: never fewer]")
    ] = None,
    max_restarts: Annotated[int | None, typer.Option(help="Give up after so many. [default: while it gets on]")] = None,
    memory: Annotated[
        Path, typer.Option("--memory-folder", metavar="DIR", help="A folder in memory, for the copies of the state.")
    ] = Path("/dev/shm"),
    preload: Annotated[
        list[str] | None, typer.Option(help="A module to import once, before ranks are forked; may be given again.")
    ] = None,
    report_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what happened to this file.")
    ] = None,
    module: ModuleName = None,
    layout: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A layout, for flatout.layout_from_environment(); as many ranks as it takes, --nproc or not.",
        ),
    ] = None,
) -> None:
    """Run SCRIPT on this machine as torchrun does, and start it again in seconds when a rank dies or hangs; see
    `flatout.Survivor`. On several machines, `flatout-torchrun` does so with torchrun's options."""
    from flatout.blocks.elastic.messages import Job
    from flatout.blocks.elastic.preemption import EXIT_CODE
    from flatout.blocks.elastic.supervisor import LEFT, Supervisor
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import to_json

    require_writable(json=report_file)
    target = target_of(script, module, arguments, example="`flatout survive --nproc 8 train.py`")
    if layout is not None:
        nproc = ranks_of(layout, 1)
        own = (str(layout.absolute()), target.kind, target.name, *target.arguments)
        target = ScriptTarget("flatout.app.cli.children.layout_rank", True, own)
    job = Job(
        target=target.name,
        arguments=target.arguments,
        is_module=target.is_module,
        nproc=nproc,
        spares=spares,
        hang_s=hang,
        start_s=start,
        least_ranks=least_ranks,
        max_restarts=max_restarts,
        memory=str(memory),
        preload=tuple(preload or ()),
    )
    report = Supervisor(job, environment=os.environ, on_progress=_log).run()
    if report_file is not None:
        write_whole_file(report_file, to_json(report))
    _log(report.summary())
    raise typer.Exit(EXIT_CODE if report.why == LEFT else 0 if report.outcome == "finished" else 1)


def _log(text: str) -> None:
    print(f"flatout survive: {text}", file=sys.stderr, flush=True)


COMMAND = Command(
    survive,
    order=210,
    group="devices",
    takes_script=True,
    examples=("flatout survive --nproc 8 train.py", "flatout survive --nproc 7 --spares 1 --hang 120 train.py"),
)
