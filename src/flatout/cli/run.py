"""`flatout run`: an unchanged script with a plan's levers pulled."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.errors import UsageError


def run(
    target: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to python.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="The plan that `flatout tune` wrote.")] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, like `python -m`.")] = None,
) -> None:
    """Run SCRIPT unchanged with the plan's levers pulled: models at their first call, optimizers and loaders at their making.

    The process becomes the script's: its output, its signals, its exit code.
    """
    from flatout.session import environment_of, read_plan

    if plan is None:
        raise UsageError("no plan given; call `flatout run --plan plan.toml train.py -- --its --arguments`")
    own = list(arguments or [])
    if module is not None:
        own, target = ([target] if target is not None else []) + own, module
    if target is None:
        raise UsageError("no script given; call `flatout run --plan plan.toml train.py -- --its --arguments`")
    own = own[1:] if own[:1] == ["--"] else own
    environment = {**os.environ, **environment_of(read_plan(plan))}
    kind = "module" if module is not None else "script"
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "flatout.cli.planned", str(plan.absolute()), kind, target, *own]
    os.execve(sys.executable, command, environment)
