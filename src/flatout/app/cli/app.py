"""The command line's application: its verbs are found in this folder, and errors of ours end here, as one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer

from flatout.app.cli.command import GROUPS, Command
from flatout.app.cli.former_options import with_present_options
from flatout.app.cli.terminal import open_console
from flatout.core.errors import FlatoutError, explained

_HELP: Final = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="flatout",
    help="Makes PyTorch models run flat out, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)


def commands() -> Iterator[tuple[str, Command]]:
    """The verbs by name, in the order of the help: the constants COMMAND of this folder's modules."""
    found: list[tuple[str, Command]] = []
    for path in Path(__file__).parent.glob("[a-z]*.py"):  # pkgutil would take 5 ms more of every start
        command: Command | None = getattr(import_module(f"flatout.app.cli.{path.stem}"), "COMMAND", None)
        if command is not None:
            found.append((path.stem, command))
    headings = list(GROUPS)
    yield from sorted(found, key=lambda pair: (headings.index(pair[1].group), pair[1].order))


def run() -> None:
    """Parse and run; an error of ours is printed without a traceback and exits with 2."""
    arguments, notes = with_present_options(sys.argv[1:])
    for note in notes:
        print(note, file=sys.stderr)
    try:
        app(arguments)
    except (FlatoutError, ModuleNotFoundError) as e:
        shown = explained(e) if isinstance(e, ModuleNotFoundError) else e
        if not isinstance(shown, FlatoutError):
            raise
        console = open_console(stderr=True)
        console.print(f"flatout: {shown}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the versions of flatout and torch, and the device, and end.")
    ] = False,
) -> None:
    if show_version:
        from importlib.metadata import version

        import torch

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        print(f"flatout {version('flatout')}, torch {torch.__version__}, {device}")
        raise typer.Exit


for _name, _command in commands():
    _heading, _examples = GROUPS[_command.group], "\n\n".join(("Examples:", *_command.examples))
    if isinstance(_command.run, typer.Typer):
        app.add_typer(_command.run, name=_name, rich_help_panel=_heading, context_settings=_HELP, epilog=_examples)
    else:
        # What flatout does not know is the script's own; after `--` everything is.
        _settings = _HELP | ({"ignore_unknown_options": True} if _command.takes_script else {})
        app.command(name=_name, context_settings=_settings, rich_help_panel=_heading, epilog=_examples)(_command.run)
