"""The command line's application: its verbs are found in this folder, and errors of ours end here, as one line."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from flatout.app.cli.command import GROUPS, Command, help_epilog
from flatout.app.cli.former_options import with_present_options
from flatout.app.cli.parameters import HELP_OPTIONS
from flatout.app.cli.project_defaults import NO_DEFAULTS, ProjectDefaults, project_defaults
from flatout.app.cli.terminal import open_console
from flatout.app.cli.typed_words import TypedWords, typed_words
from flatout.core.errors import FlatoutError, UsageError, explained
from flatout.core.exit_codes import REFUSED_INPUT

_HELP: Final = {"help_option_names": list(HELP_OPTIONS)}
_ISOLATED: Final = "--isolated"

_MISTYPED: Final[type[Exception]] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
"""What Typer's parser raises of any kind: Click's class, or Typer's copy of it, which no public name has."""
_NO_COMMAND: Final = re.compile(r"No such command '(.+?)'")


class _OrderedVerbs(TyperGroup):
    """Verbs in the order of the help: Typer itself puts those that have verbs of their own last."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, _ in commands() if name in self.commands]


app = typer.Typer(
    name="flatout",
    cls=_OrderedVerbs,
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
    known = dict(commands())
    try:
        typed = typed_words(sys.argv[1:], known)
        own, notes = with_present_options(typed.own, verb=typed.verb)
        if typed.verb and not typed.asks_help:
            _require_posix(typed.verb, known[typed.verb])
        defaults = _defaults(typed, known)
        for note in (*notes, defaults.note(typed), typed.note):
            if note and os.environ.get("RANK", "0") == "0":  # of several ranks, one says it
                print(note, file=sys.stderr)
        sys.exit(app(typed.parsable(own), default_map={typed.verb: defaults.values}, standalone_mode=False))
    except _MISTYPED as e:
        if e.format_message():  # type: ignore[attr-defined]  # else it has shown the help
            _print_error(_typed_wrong(e, known))
        sys.exit(REFUSED_INPUT)
    except typer.Abort:
        from flatout.core.runtime.script import INTERRUPTED

        sys.exit(INTERRUPTED)
    except (FlatoutError, ModuleNotFoundError) as e:
        shown = explained(e) if isinstance(e, ModuleNotFoundError) else e
        if not isinstance(shown, FlatoutError):
            raise
        _print_error(str(shown))
        sys.exit(REFUSED_INPUT)


def _require_posix(verb: str, command: Command) -> None:
    """Raises UsageError where a verb runs scripts and the system cannot fork a process, or send it signals."""
    if command.takes_script and not hasattr(os, "fork"):
        raise UsageError(
            f"`flatout {verb}` runs scripts on Linux and macOS; on Windows call it in WSL 2, and see `flatout -h`"
        )


def _print_error(text: str) -> None:
    console = open_console(stderr=True)
    console.print(f"flatout: {text}", style="red", markup=False, highlight=False, soft_wrap=True)


def _typed_wrong(error: Any, known: Collection[str]) -> str:
    """An error of Typer's parser as one line, with the nearest verb or where to look."""
    verb = error.ctx.command_path if getattr(error, "ctx", None) is not None else "flatout"
    text = error.format_message().rstrip(".").partition(", unable to parse")[0]
    if match := _NO_COMMAND.match(text):
        near = get_close_matches(match[1], known, n=1)
        hint = f"did you mean `flatout {near[0]}`?" if near else "see `flatout -h`"
        return f"there is no `{verb} {match[1]}`; {hint}"
    place = f"`{verb}`: " if " " in verb else ""
    return f"{place}{text[:1].lower()}{text[1:]}; see `{verb} -h`"


def _defaults(typed: TypedWords, known: dict[str, Command]) -> ProjectDefaults:
    """What the project sets of the verb; a help is shown without it where it is wrong, so that it can be mended."""
    if not typed.verb or _ISOLATED in typed.own[: typed.own.index(typed.verb)]:
        return NO_DEFAULTS
    try:
        return project_defaults(typed.verb, known, folder=Path.cwd())
    except UsageError as e:
        if not typed.asks_help:
            raise
        print(f"note: {e}", file=sys.stderr)
        return NO_DEFAULTS


@app.callback(invoke_without_command=True)
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the versions of flatout and torch, and the device, and end.")
    ] = False,
    is_isolated: Annotated[
        bool,
        typer.Option(_ISOLATED, help="Leave out the table \\[tool.flatout] of pyproject.toml, which sets defaults."),
    ] = False,
) -> None:
    if show_version:
        import torch

        from flatout.core.own_version import own_version

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        print(f"flatout {own_version()}, torch {torch.__version__}, {device}")
        raise typer.Exit


for _name, _command in commands():
    _heading, _examples = GROUPS[_command.group], help_epilog(*_command.examples)
    if isinstance(_command.run, typer.Typer):
        app.add_typer(_command.run, name=_name, rich_help_panel=_heading, context_settings=_HELP, epilog=_examples)
    else:
        app.command(name=_name, context_settings=_HELP, rich_help_panel=_heading, epilog=_examples)(_command.run)
