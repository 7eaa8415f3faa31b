"""`flatout edit`: a plan as the change that a person would make in the script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flatout.errors import UsageError

if TYPE_CHECKING:
    from flatout.levers.editing import Edits

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
    from flatout.records.plan import to_toml
    from flatout.records.record import write_file
    from flatout.session import edit_script, read_plan

    if plan is None:
        raise UsageError("no plan given; call `flatout edit --plan plan.toml train.py`")
    if not script.is_file():
        raise UsageError(f"'{script}' is not a file; give the script that the plan was made for")
    if write and into is not None:
        raise UsageError("--write changes the files in place and --into writes copies; give one of them")
    if rest is not None and not rest.absolute().parent.is_dir():
        raise UsageError(
            f"--rest {rest}: there is no folder '{rest.absolute().parent}'; give a path in one that exists"
        )
    made = edit_script(read_plan(plan), script)
    written = made.write(into) if write or into is not None else ()
    sys.stdout.write(made.diff())
    sys.stdout.flush()
    _tell(made, written)
    if rest is not None:
        write_file(rest, to_toml(made.rest))
    raise typer.Exit(_SOME_STAYED if made.stayed else 0)


def _tell(made: Edits, written: tuple[Path, ...]) -> None:
    """On stderr, so that stdout is the diff alone."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    for path in written:
        console.print(f"wrote {path}")
    for planned, because in made.stayed:
        console.print(f"{planned.id} stays in the plan: {because}")
