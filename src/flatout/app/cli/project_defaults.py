"""Defaults of options in a project: the table `[tool.flatout]` of its pyproject.toml."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from flatout.app.cli.parameters import Kind, Parameter, parameters_of
from flatout.app.cli.project_table import project_table
from flatout.core.errors import UsageError

if TYPE_CHECKING:
    from flatout.app.cli.command import Command
    from flatout.app.cli.typed_words import TypedWords

Value = bool | int | float | str | list[str]
_WANTED: Final[dict[Kind, str]] = {
    "flag": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "text": "a text",
    "path": "a path as text",
}


class ProjectDefaults(NamedTuple):
    """What a verb takes from a file, by the names of its parameters."""

    file: Path | None
    """The file with the table; None where there is none above the working directory."""
    values: dict[str, Value]
    options: dict[str, str]
    """The long option of each value."""

    def note(self, typed: TypedWords) -> str:
        """One line that names what the file sets and the command line does not; '' for nothing."""
        words = [
            word
            for name, value in self.values.items()
            if name not in typed.options and value is not False
            for word in _shown(self.options[name], value)
        ]
        return f"note: {os.path.relpath(self.file)} sets {shlex.join(words)}" if self.file is not None and words else ""


NO_DEFAULTS: Final = ProjectDefaults(None, {}, {})


def project_defaults(verb: str, known: Mapping[str, Command], *, folder: Path) -> ProjectDefaults:
    """The defaults of a verb's options, from the nearest pyproject.toml at or above `folder` that has `[tool.flatout]`.

    `[tool.flatout]` is for all verbs that have the option, `[tool.flatout.VERB]` for one, and goes first. Paths are relative to
    the file. The whole table is checked, whatever the verb.

    Raises UsageError for a file that is no TOML, a key that is no option, and a value of the wrong type.
    """
    file, table = project_table(folder)
    if file is None:
        return NO_DEFAULTS
    by_verb = {name: {one.long_option[2:]: one for one in _settable(command)} for name, command in known.items()}
    tables = {key: value for key, value in table.items() if key in known and isinstance(value, dict)}
    shared = {key: value for key, value in table.items() if key not in tables}
    every_key = {key for options in by_verb.values() for key in options}
    _require_known(shared, [*every_key, *known], where=f"'{file}': [tool.flatout]")
    found: dict[str, dict[str, Value]] = {}
    for name, options in by_verb.items():
        own = tables.get(name, {})
        _require_known(own, list(options), where=f"'{file}': [tool.flatout.{name}]")
        found[name] = {
            options[key].name: _checked(
                value, options[key], where=f"'{file}': [tool.flatout{f'.{name}' if key in own else ''}]", verb=name
            )
            for key, value in (shared | own).items()
            if key in options
        }
    taken = {one.name: one for one in by_verb[verb].values()}
    return ProjectDefaults(
        file,
        {name: _beside(file, value) if taken[name].kind == "path" else value for name, value in found[verb].items()},
        {name: one.long_option for name, one in taken.items()},
    )


def _settable(command: Command) -> Iterator[Parameter]:
    return (one for one in parameters_of(command) if one.long_option and not one.is_hidden)


def _require_known(keys: Iterable[str], known: list[str], *, where: str) -> None:
    """Raises UsageError for the first key that is none of those known, with the nearest."""
    from difflib import get_close_matches

    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "keys are long options without the dashes, or verbs"
            raise UsageError(f"{where} has the unknown key {key}; {hint}")


def _checked(value: object, option: Parameter, *, where: str, verb: str) -> Value:
    """The value as the option takes it: a number stands for its text. Raises UsageError where it cannot."""
    key = option.long_option[2:]
    if option.is_list:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return value
        raise UsageError(
            f'{where} {key} = {value!r} is no list of texts, as --{key} of `flatout {verb}` is; write ["..."]'
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = {
        "flag": isinstance(value, bool),
        "integer": is_number and isinstance(value, int),
        "number": is_number,
        "text": is_number or isinstance(value, str),
        "path": isinstance(value, str),
    }[option.kind]
    if not fits:
        raise UsageError(
            f"{where} {key} = {value!r} is not what --{key} of `flatout {verb}` takes; write {_WANTED[option.kind]}"
        )
    assert isinstance(value, bool | int | float | str)
    if option.minimum is not None and is_number and value < option.minimum:  # type: ignore[operator]
        raise UsageError(f"{where} {key} = {value!r} is below {option.minimum:g}, the least that --{key} takes")
    return str(value) if option.kind == "text" else value


def _beside(file: Path, value: Value) -> Value:
    """A path that is relative to the file, as one that is relative to the working directory; `-` stays."""
    assert isinstance(value, str)
    return value if value == "-" else os.path.relpath(file.parent / value)


def _shown(option: str, value: Value) -> list[str]:
    if value is True:
        return [option]
    return [word for one in (value if isinstance(value, list) else [value]) for word in (option, str(one))]
