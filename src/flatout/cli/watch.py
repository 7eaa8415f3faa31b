"""`flatout watch`: an unchanged script that leaves a record of its run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def watch(
    target: Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to python.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="The folder that the run's folder is made in.")] = Path("runs"),
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")] = False,
) -> None:
    """Run SCRIPT unchanged and record what `flatout replay` and `flatout runs` need; the exit code is the script's."""
    from flatout.profiling.running.script import load_module, load_script, run_script
    from flatout.runs.run import Run

    own = tuple(arguments or ())
    own = own[1:] if own[:1] == ("--",) else own
    script = (load_module if module else load_script)(target, own)
    with Run(folder, name=Path(target).stem, ticks="optimizer") as run:
        outcome = run_script(script)
        if outcome.exit not in ("finished", "stopped"):
            run.fail(outcome.exit)
    sys.stdout.flush()
    raise typer.Exit(outcome.exit_code)
