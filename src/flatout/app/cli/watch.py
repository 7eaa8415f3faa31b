"""`flatout watch`: an unchanged script that leaves a record of its run, and a row in the store of all jobs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import Arguments, ModuleName, Script, target_of
from flatout.app.cli.terminal import print_lines
from flatout.core.errors import UsageError


def watch(
    script: Script = None,
    arguments: Arguments = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="The folder that the run's folder is made in.")] = Path(
        "runs"
    ),
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where `flatout fleet` finds the job: a folder, or a file called .sqlite. [default: FLATOUT_STORE, else the "
            "user's own]",
        ),
    ] = None,
    is_command: Annotated[
        bool,
        typer.Option(
            "--command", help="SCRIPT is a command, such as torchrun: watch the trainings of all its Pythons."
        ),
    ] = False,
    module: ModuleName = None,
) -> None:
    """Run SCRIPT unchanged and record what `flatout replay`, `flatout runs` and `flatout fleet` need.

    The exit code is the script's. With --command no folder is made: the command takes this process's place, as in the entry
    point of a container.
    """
    from flatout.app.fleet.hook import await_training
    from flatout.app.fleet.overview import store_path
    from flatout.blocks.recording.job_store.opening import open_store, policy_of

    path = store_path(store)
    open_store(path), policy_of(path)  # what is wrong with them is said before the training begins
    if is_command:
        _run_command(script, arguments, module, path)
    from flatout.blocks.recording.run import Run
    from flatout.core.runtime.script import load_module, load_script, run_script

    target = target_of(script, module, arguments, example="`flatout watch train.py -- --its --arguments`")
    loaded = (load_module if target.is_module else load_script)(target.name, target.arguments)
    os.environ.update(FLATOUT_STORE=str(path.absolute()))
    stop_waiting = await_training({"FLATOUT_WATCH": "1"})
    with Run(folder, name=Path(target.name).stem, ticks="optimizer") as run:
        outcome = run_script(loaded)
        has_failed = outcome.exit not in ("finished", "stopped")
        if has_failed:
            run.fail(outcome.exit)
    stop_waiting()
    sys.stdout.flush()
    _end_watch(outcome.exit if has_failed else "")
    raise typer.Exit(outcome.exit_code)


def _end_watch(error: str) -> None:
    """Write the job's last record, and print what watching took; nothing where no training was watched."""
    watcher = sys.modules.get("flatout.app.fleet.watcher")
    if watcher is not None and (text := watcher.end_watch(error)):
        print_lines(f"flatout: {text}", stderr=True)


def _run_command(name: str | None, arguments: list[str] | None, module: str | None, store: Path) -> NoReturn:
    from flatout.app.fleet.installing import watched_environment

    if name is None or module is not None:
        raise UsageError("--command needs a command; call `flatout watch --command torchrun train.py`")
    found = shutil.which(name)
    if found is None:
        raise UsageError(f"there is no command '{name}'; give one that the shell finds")
    sys.stdout.flush()
    os.execve(found, [name, *(arguments or [])], watched_environment(os.environ, store))


COMMAND = Command(
    watch,
    order=190,
    group="prove",
    takes_script=True,
    examples=(
        "flatout watch train.py -- --epochs 1",
        "flatout watch --command torchrun -- --nproc-per-node 2 train.py",
    ),
)
