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
from flatout.core.errors import UsageError


def survive(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to torchrun.")
    ] = None,
    arguments: Arguments = None,
    nproc: Annotated[int, typer.Option(metavar="N", help="Ranks on each node, one for each GPU.")] = 1,
    spares: Annotated[
        int, typer.Option(help="Device slots (GPUs) of each node beyond those, for ones that keep failing.")
    ] = 0,
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
    nodes: Annotated[int, typer.Option(metavar="N", help="Machines; start the same command on each.")] = 1,
    node_rank: Annotated[int, typer.Option(help="Which of them this is, from 0.")] = 0,
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Node 0, as all nodes reach it.")] = "",
    join: Annotated[float, typer.Option(help="Seconds to wait for nodes.")] = 60.0,
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
    """Run SCRIPT as torchrun does, and start it again in seconds when a rank dies or hangs; see `flatout.Survivor`."""
    import socket

    from flatout.blocks.elastic.messages import Job
    from flatout.blocks.elastic.node import host_and_port, serve_node
    from flatout.blocks.elastic.supervisor import Supervisor
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import to_json

    require_writable(json=report_file)
    target = target_of(script, module, arguments, example="`flatout survive --nproc 8 train.py`")
    if layout is not None:
        nproc = ranks_of(layout, nodes)
        own = (str(layout.absolute()), target.kind, target.name, *target.arguments)
        target = ScriptTarget("flatout.app.cli.children.layout_rank", True, own)
    job = Job(
        target=target.name,
        arguments=target.arguments,
        is_module=target.is_module,
        nproc=nproc,
        spares=spares,
        nnodes=nodes,
        hang_s=hang,
        start_s=start,
        join_s=join,
        least_ranks=least_ranks,
        max_restarts=max_restarts,
        memory=str(memory),
        preload=tuple(preload or ()),
    )
    if not 0 <= node_rank < nodes or (nodes > 1) != bool(coordinator):
        raise UsageError(
            f"node {node_rank} of {nodes}, coordinator '{coordinator}': number nodes from 0, and name node 0 as "
            "HOST:PORT where there are several"
        )
    if not coordinator:
        report = Supervisor(job, environment=os.environ, on_progress=_log).run()
    else:
        host, port = host_and_port(coordinator)
        if node_rank:
            raise typer.Exit(serve_node(job, node_rank, (host, port), os.environ))
        with socket.create_server(("", port), backlog=nodes) as listen:
            report = Supervisor(job, environment=os.environ, listen=listen, host=host, on_progress=_log).run()
    if report_file is not None:
        write_whole_file(report_file, to_json(report))
    _log(report.summary())
    raise typer.Exit(0 if report.outcome == "finished" else 1)


def _log(text: str) -> None:
    print(f"flatout survive: {text}", file=sys.stderr, flush=True)


COMMAND = Command(
    survive,
    order=210,
    group="devices",
    takes_script=True,
    examples=(
        "flatout survive --nproc 8 train.py",
        "flatout survive --nproc 8 --nodes 2 --node-rank 0 --coordinator node0:29400 train.py",
    ),
)
