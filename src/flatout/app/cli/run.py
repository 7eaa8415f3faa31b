"""`flatout run`: an unchanged script with a plan's levers pulled, or on as many ranks as a layout takes."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from flatout.app.cli.children.layout_rank import ranks_of
from flatout.app.cli.command import Command
from flatout.app.cli.options import Arguments, ModuleName, Script, target_of
from flatout.app.targets import ScriptTarget
from flatout.core.errors import UsageError

_LONGEST_S: Final = 24 * 3600.0
"""What a run of the untouched script may take; the user can end it by Ctrl-C."""


def run(
    target: Script = None,
    arguments: Arguments = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="The plan that `flatout tune` wrote.")
    ] = None,
    module: ModuleName = None,
    check_after: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Compare the mean of the last fifth of N losses with that of the untouched script on three seeds, which are "
            "run first where the plan does not hold them yet.",
        ),
    ] = 0,
    layout: Annotated[
        Path | None, typer.Option("--layout", metavar="FILE", help="The layout that `flatout scale --out` wrote.")
    ] = None,
    nodes: Annotated[int, typer.Option(metavar="N", help="Machines, with --layout; the ranks are divided evenly.")] = 1,
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="The first machine, with --nodes.")] = "",
    srun: Annotated[bool, typer.Option("--srun", help="Start on all machines of a Slurm job.")] = False,
    only_print: Annotated[
        bool,
        typer.Option("--print", help="Print what would run and start nothing; a plan is prepared and checked first."),
    ] = False,
) -> None:
    """Run SCRIPT unchanged with the levers of a plan applied to its models, optimizers and data loaders.

    With --layout: print and start the torchrun (or srun) command for as many ranks as the layout takes; the script asks for it
    with flatout.layout_from_environment(). The process becomes the script's: its output, its signals, its exit code.
    """
    if (plan is None) == (layout is None):
        raise UsageError(
            "give a plan or a layout: `flatout run --plan plan.toml train.py -- --its --arguments`, or --layout layout.toml"
        )
    wanted = target_of(
        target, module, arguments, example="`flatout run --plan plan.toml train.py -- --its --arguments`"
    )
    wanted.refuse_notebook()
    words = [wanted.kind, wanted.name, *wanted.arguments]
    if check_after and layout is not None:
        raise UsageError("--check-after compares a run with a plan; it does not go with --layout")
    if layout is not None:
        _start(_command(layout, nodes, coordinator, words, is_slurm=srun), only_print)
        return
    assert plan is not None
    sys.stdout.flush()
    sys.stderr.flush()
    options = ["--print"] if only_print else []
    if check_after and not only_print:
        _ensure_losses(plan, wanted, check_after)
        options.append("--check-losses")
    command = [sys.executable, "-m", "flatout.app.cli.children.planned_run", *options, str(plan.absolute()), *words]
    os.execve(sys.executable, command, dict(os.environ))


def _ensure_losses(path: Path, target: ScriptTarget, num_losses: int) -> None:
    """Have the plan hold what the untouched script learns in so many losses."""
    import msgspec

    from flatout.app.cli.ranks import launched_rank
    from flatout.app.cli.terminal import open_console
    from flatout.app.plans import must_fit, read_plan
    from flatout.core.files import write_whole_file
    from flatout.core.records.plan import digest_of_run, to_toml
    from flatout.tune.verify.losses import joined_losses, loss_spread
    from flatout.tune.verify.side_process import Request

    plan, file = read_plan(path), target.file
    clash = next((planned.id for planned in plan.lever if not joined_losses([planned])), None)
    if clash is not None:
        raise UsageError(
            f"--check-after counts calls of backward, and {clash} changes how many there are for the same data"
        )
    run = digest_of_run(file.read_bytes(), target.arguments)
    if plan.losses is not None and (plan.losses.num_losses, plan.losses.run) == (num_losses, run):
        return
    if launched_rank(os.environ) is not None:
        raise UsageError("the plan does not hold the untouched script's losses yet; run once with one process first")
    must_fit(plan, file)
    if not os.access(path, os.W_OK):
        raise UsageError(f"'{path}' cannot be written, and the untouched script's losses go there; give a copy of it")
    script = Request(target=target.name, kind=target.kind, arguments=target.arguments)
    with open_console(stderr=True).status("starting") as line:
        losses = loss_spread(script, num_losses, run, timeout_s=_LONGEST_S, on_progress=line.update)
    write_whole_file(path, to_toml(msgspec.structs.replace(plan, losses=losses)))


def _command(path: Path, nodes: int, coordinator: str, target: list[str], *, is_slurm: bool) -> list[str]:
    """What starts the ranks of this machine, or of all."""
    each = ranks_of(path, nodes)
    if nodes > 1 and not coordinator:
        raise UsageError(f"{nodes} machines meet at the first one; give --coordinator HOST:PORT")
    meeting = (
        ["--standalone"]
        if nodes == 1
        else ["--rdzv-backend=c10d", f"--rdzv-endpoint={coordinator}", "--rdzv-id=flatout"]
    )
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={each}", *meeting]
    command += ["-m", "flatout.app.cli.children.layout_rank", str(path.absolute()), *target]
    return ["srun", f"--nodes={nodes}", "--ntasks-per-node=1", *command] if is_slurm else command


def _start(command: list[str], only_print: bool) -> None:
    print(shlex.join(command), flush=True)
    if only_print:
        return
    if shutil.which(command[0]) is None:
        raise UsageError(f"there is no '{command[0]}' here; start the command above by other means")
    sys.stderr.flush()
    os.execvp(command[0], command)


COMMAND = Command(
    run,
    order=160,
    group="fix",
    takes_script=True,
    examples=("flatout run --plan plan.toml train.py -- --epochs 100", "flatout run --layout layout.toml train.py"),
)
