"""`flatout watch`: an unchanged script that leaves a record of its run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import Arguments, ModuleName, Script, target_of


def watch(
    script: Script = None,
    arguments: Arguments = None,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="The folder that the run's folder is made in.")] = Path(
        "runs"
    ),
    module: ModuleName = None,
) -> None:
    """Run SCRIPT unchanged and record what `flatout replay` and `flatout runs` need; the exit code is the script's."""
    from flatout.blocks.recording.run import Run
    from flatout.core.runtime.script import load_module, load_script, run_script

    target = target_of(script, module, arguments, example="`flatout watch train.py -- --its --arguments`")
    loaded = (load_module if target.is_module else load_script)(target.name, target.arguments)
    with Run(folder, name=Path(target.name).stem, ticks="optimizer") as run:
        outcome = run_script(loaded)
        if outcome.exit not in ("finished", "stopped"):
            run.fail(outcome.exit)
    sys.stdout.flush()
    raise typer.Exit(outcome.exit_code)


COMMAND = Command(
    watch,
    order=190,
    group="prove",
    takes_script=True,
    examples=("flatout watch train.py -- --epochs 1", "flatout watch --folder runs train.py"),
)
