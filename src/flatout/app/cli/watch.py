"""`flatout watch`: an unchanged script that leaves a record of its run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import Arguments, IsModule


def watch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to python.")],
    arguments: Arguments = None,
    folder: Annotated[Path, typer.Option(help="The folder that the run's folder is made in.")] = Path("runs"),
    module: IsModule = False,
) -> None:
    """Run SCRIPT unchanged and record what `flatout replay` and `flatout runs` need; the exit code is the script's."""
    from flatout.blocks.recording.run import Run
    from flatout.core.runtime.script import load_module, load_script, run_script

    own = tuple(arguments or ())
    script = (load_module if module else load_script)(target, own)
    with Run(folder, name=Path(target).stem, ticks="optimizer") as run:
        outcome = run_script(script)
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
