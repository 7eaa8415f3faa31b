"""The words of a command line: which are flatout's own, and where the script's begin. Those are passed on as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flatout.app.cli.command import Command
from flatout.app.cli.former_options import FORMER_OPTIONS
from flatout.app.cli.parameters import HELP_OPTIONS, Parameter, parameters_of
from flatout.core.errors import UsageError


class TypedWords(NamedTuple):
    """A command line, divided after the script or `-m MODULE`: as with python, all that follows is the script's."""

    own: tuple[str, ...]
    """The verb, its options and the script."""
    verb: str = ""
    """'' where there is none, or none that is known."""
    script: str = ""
    """`train.py` or `-m package.train`; '' where the verb takes none or it was not reached."""
    arguments: tuple[str, ...] = ()
    """What follows the script; may begin with `--`."""
    options: frozenset[str] = frozenset()
    """Names of the verb's parameters whose options were typed."""
    misplaced: tuple[str, ...] = ()
    """Options among the arguments that the verb has, too, where no `--` divides them from the script."""
    asks_help: bool = False

    @property
    def note(self) -> str:
        """One line about options that may have been meant for the verb; '' where there are none."""
        if not self.misplaced:
            return ""
        names, is_one = ", ".join(self.misplaced), len(self.misplaced) == 1
        come, go, it = ("comes", "goes", "it") if is_one else ("come", "go", "them")
        return (
            f"note: {names} {come} after {self.script} and {go} to it; put {it} before if meant for flatout, else write "
            f"`{self.script} --`"
        )

    def parsable(self, own: Sequence[str]) -> list[str]:
        """The words for a parser that takes all behind `--` as they are; `own` replaces those of flatout."""
        divider = ["--"] if self.arguments and self.arguments[0] != "--" else []
        return [*own, *divider, *self.arguments]


def typed_words(words: Sequence[str], known: Mapping[str, Command]) -> TypedWords:
    """Divide the words of a command line whose verbs are `known`.

    Raises UsageError for an option before the script that the verb does not have, with the nearest one that it has.
    """
    at = next((i for i, word in enumerate(words) if not word.startswith("-")), len(words))
    if at == len(words) or words[at] not in known:
        return TypedWords(tuple(words))
    verb = words[at]
    parameters, takes_script = parameters_of(known[verb]), known[verb].takes_script
    options = {option: parameter for parameter in parameters for option in parameter.options}
    options |= {former: options[present] for former, present in FORMER_OPTIONS.get(verb, {}).items()}
    missing = sum(not parameter.options and not parameter.is_list for parameter in parameters)
    typed: set[str] = set()
    asks_help, script = False, ""
    at += 1
    while at < len(words) and words[at] != "--" and not (takes_script and missing == 0):
        word = words[at]
        at += 1
        if word == "-" or not word.startswith("-"):
            missing, script = missing - 1, word
        elif word in HELP_OPTIONS:
            asks_help = True
        elif (option := _option_in(word, options)) is not None:
            typed.add(option.name)
            value = word.removeprefix("-m")
            if not option.is_flag and word in options:
                value, at = words[at] if at < len(words) else "", at + 1
            if option.is_module:
                missing, script = missing - 1, f"-m {value}"
        elif takes_script:
            raise _unknown(word, verb, options)
    if not (takes_script and missing == 0):
        return TypedWords(tuple(words), verb=verb, options=frozenset(typed), asks_help=asks_help)
    arguments = tuple(words[at:])
    return TypedWords(
        own=tuple(words[:at]),
        verb=verb,
        script=script,
        arguments=arguments,
        options=frozenset(typed),
        misplaced=_misplaced(arguments, options),
        asks_help=asks_help,
    )


def _option_in(word: str, options: Mapping[str, Parameter]) -> Parameter | None:
    """The option that a word begins with: `--json`, `--json=FILE`, `-m`, `-mMODULE`."""
    if word.startswith("--"):
        return options.get(word.partition("=")[0])
    short = options.get(word[:2])
    return short if short is not None and (word == word[:2] or not short.is_flag) else None


def _misplaced(arguments: Sequence[str], options: Mapping[str, Parameter]) -> tuple[str, ...]:
    names = [word.partition("=")[0] for word in arguments[: arguments.index("--") if "--" in arguments else None]]
    return tuple(dict.fromkeys(name for name in names if name in options or name in HELP_OPTIONS))


def _unknown(word: str, verb: str, options: Mapping[str, Parameter]) -> UsageError:
    from difflib import get_close_matches

    name = word.partition("=")[0]
    shown = [option for parameter in options.values() if not parameter.is_hidden for option in parameter.options]
    near = get_close_matches(name, shown, n=1)
    hint = f"did you mean {near[0]}?" if near else f"see `flatout {verb} -h`."
    return UsageError(f"`flatout {verb}` has no option {name}; {hint} Options of the script come after it")
