"""`flatout edit`: a plan as the change that a person would make in the script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import require_file, require_folders
from flatout.app.cli.terminal import print_lines
from flatout.core.errors import UsageError

_SOME_STAYED = 2


def edit(
    script: Annotated[Path, typer.Argument(help="The script that the plan was made for.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="The script's own arguments; they change nothing here."),
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", help="The plan that `flatout tune` wrote.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Change the files in place.")] = False,
    into: Annotated[
        Path | None, typer.Option("--into", "-o", metavar="DIR", help="Write the changed files into this folder.")
    ] = None,
    rest: Annotated[
        Path | None, typer.Option("--rest", metavar="FILE", help="Write the plan of the levers that stay in the plan.")
    ] = None,
) -> None:
    """Print the plan as a diff of SCRIPT and the files it imports; `patch -p1` in the script's folder takes it.

    Exits with 0 when the text then holds all of the plan, with 2 when levers stay in the plan, which are named with the reason.
    """
    from flatout.app.session import read_plan
    from flatout.core.records.plan import to_toml
    from flatout.core.records.record import write_whole_file
    from flatout.tune.edits import edits

    if plan is None:
        raise UsageError("no plan given; call `flatout edit --plan plan.toml train.py`")
    require_file(script, what="the script that the plan was made for")
    if write and into is not None:
        raise UsageError("--write changes the files in place and --into writes copies; give one of them")
    require_folders(rest=rest)
    found = edits(read_plan(plan), script)
    written = found.write(into) if write or into is not None else ()
    sys.stdout.write(found.diff())
    sys.stdout.flush()
    # on stderr, so that stdout is the diff alone
    print_lines(*(f"wrote {path}" for path in written), stderr=True)
    print_lines(*(f"{one.id} stays in the plan: {because}" for one, because in found.stayed), stderr=True)
    if rest is not None:
        write_whole_file(rest, to_toml(found.rest))
    raise typer.Exit(_SOME_STAYED if found.stayed else 0)


COMMAND = Command(edit, order=170, takes_script=True)
