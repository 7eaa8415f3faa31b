"""The options and arguments of each verb, as its function declares them: for what looks at a command line before it is parsed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from flatout.app.cli.command import Command

Kind = Literal["flag", "integer", "number", "text", "path"]
_KINDS: Final[dict[type, Kind]] = {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}
HELP_OPTIONS: Final = ("-h", "--help")
"""What asks for the help of the command and of every verb."""


class Parameter(NamedTuple):
    """One option or argument of a verb."""

    name: str
    """Of the function's parameter, by which Typer knows it, too."""
    options: tuple[str, ...]
    """Its names on the command line, as `--out` and `-o`; none for an argument."""
    kind: Kind
    is_list: bool
    """Whether an option may come several times, or an argument takes all that is left."""
    metavar: str
    help: str
    is_hidden: bool
    minimum: float | None
    """The smallest number that is allowed; None where all are."""

    @property
    def long_option(self) -> str:
        """Its name with two dashes; '' for an argument and for an option that has a short name alone."""
        return next((option for option in self.options if option.startswith("--")), "")

    @property
    def is_flag(self) -> bool:
        """Whether it takes no value."""
        return self.kind == "flag"

    @property
    def is_module(self) -> bool:
        """Whether it is `-m MODULE`, which stands in the place of the script."""
        return "-m" in self.options and not self.is_flag


def parameters_of(command: Command) -> tuple[Parameter, ...]:
    """What the verb itself takes; for a verb with verbs of its own, what it takes without one of them."""
    run = command.run
    if isinstance(run, typer.Typer):
        callback = run.registered_callback
        return _parameters(callback.callback) if callback is not None and callback.callback is not None else ()
    return _parameters(run)


def verbs_within(command: Command) -> dict[str, tuple[Parameter, ...]]:
    """The verbs that a verb has of its own, as `diff` of `flatout runs`, with what each takes."""
    if not isinstance(command.run, typer.Typer):
        return {}
    functions = [(one.name, one.callback) for one in command.run.registered_commands]
    return {name or function.__name__: _parameters(function) for name, function in functions if function is not None}


@cache
def _parameters(function: Callable[..., object]) -> tuple[Parameter, ...]:
    return tuple(_declared(function))


def _declared(function: Callable[..., object]) -> Iterator[Parameter]:
    hints = get_type_hints(function, include_extras=True)
    for name in inspect.signature(function).parameters:
        if get_origin(hints[name]) is not Annotated:
            continue  # the context
        annotation, *extras = get_args(hints[name])
        info = next(extra for extra in extras if isinstance(extra, ParameterInfo))
        plain = _without_none(annotation)
        is_list = get_origin(plain) is list
        # the first text that is given to typer.Option inside of Annotated is a name, which is in the place of the default
        declared = tuple(
            one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str) and one.startswith("-")
        )
        yield Parameter(
            name=name,
            options=(declared or (f"--{name.replace('_', '-')}",)) if isinstance(info, OptionInfo) else (),
            kind=_KINDS[get_args(plain)[0] if is_list else plain],
            is_list=is_list,
            metavar=info.metavar or "",
            help=info.help or "",
            is_hidden=info.hidden,
            minimum=info.min,
        )


def _without_none(annotation: type) -> type:
    """The type itself of `T | None`."""
    found = [one for one in get_args(annotation) if one is not type(None)]
    is_optional = type(None) in get_args(annotation)
    return found[0] if is_optional else annotation
