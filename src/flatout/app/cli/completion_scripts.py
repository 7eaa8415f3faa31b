"""Scripts that complete the command line in bash, zsh and fish. All that can be typed is written into them."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.parameters import HELP_OPTIONS, Parameter, parameters_of, verbs_within

ROOT_OPTIONS: Final = (*HELP_OPTIONS, "--version", "--isolated")
_HELP_LENGTH: Final = 90


class CompletedVerb(NamedTuple):
    """What may be typed after a verb."""

    name: str
    """`check`, or `runs diff` for a verb within another."""
    help: str
    options: tuple[Parameter, ...]
    num_arguments: int | None
    """How many stand before the script's own; None where the verb takes no script."""
    names: tuple[str, ...]
    """What its argument is one of; none where it is a file."""


def completed_verbs(known: Mapping[str, Command]) -> list[CompletedVerb]:
    """All verbs with what they take."""
    return [one for name, command in known.items() for one in _completed(name, command)]


def values_of(option: Parameter) -> tuple[str, ...]:
    """What an option's value is one of; none where it is something else."""
    from flatout.app.option_values import ALLOWED_GUARANTEES
    from flatout.core.records.verdict import PRECISIONS

    known: dict[str, tuple[str, ...]] = {"GUARANTEE": ALLOWED_GUARANTEES, "PRECISION": tuple(PRECISIONS)}
    return known.get(option.metavar, tuple(option.metavar.split("|")) if "|" in option.metavar else ())


def bash_script(verbs: Sequence[CompletedVerb]) -> str:
    """Completion in bash: the text of its script."""
    outer = " ".join(one.name for one in verbs if " " not in one.name)
    inner = "|".join(shlex.quote(one.name) for one in verbs if " " in one.name)
    cases, values = [], []
    for verb in verbs:
        options = " ".join((*(name for one in verb.options for name in one.options), *HELP_OPTIONS))
        valued = " ".join(name for one in verb.options if not one.is_flag for name in one.options)
        left = -1 if verb.num_arguments is None else verb.num_arguments
        taken = f'options="{options}" valued=" {valued} " left={left} names="{" ".join(verb.names)}"'
        cases.append(f"        {shlex.quote(verb.name)}) {taken} ;;")
        for one in verb.options:
            for name in one.options:
                if words := values_of(one):
                    values.append(
                        f'            {shlex.quote(f"{verb.name} {name}")}) _flatout_words "{" ".join(words)}" ;;'
                    )
                elif one.kind == "path":
                    values.append(
                        f"            {shlex.quote(f'{verb.name} {name}')}) _flatout_paths {_compgen(one)} ;;"
                    )
    return _BASH.format(
        verbs=outer, inner=inner, root=" ".join(ROOT_OPTIONS), cases="\n".join(cases), values="\n".join(values)
    )


def zsh_script(verbs: Sequence[CompletedVerb]) -> str:
    """Completion in zsh: the text of its script."""
    described = [f"        {_zsh(f'{one.name}:{one.help}')}" for one in verbs if " " not in one.name]
    cases = [
        f"        {shlex.quote(verb.name)})\n            _arguments -S {' '.join(_zsh_arguments(verb))} ;;"
        for verb in sorted(verbs, key=lambda one: " " not in one.name)
    ]
    inner = sorted({one.name.partition(" ")[0] for one in verbs if " " in one.name})
    return _ZSH.format(
        described="\n".join(described), cases="\n".join(cases), inner="|".join(inner), root=" ".join(ROOT_OPTIONS)
    )


def fish_script(verbs: Sequence[CompletedVerb]) -> str:
    """Completion in fish: the text of its script."""
    return "\n".join(("complete -c flatout -e", "complete -c flatout -f", *_fish_lines(verbs), ""))


SHELLS: Final[dict[str, Callable[[Sequence[CompletedVerb]], str]]] = {
    "bash": bash_script,
    "zsh": zsh_script,
    "fish": fish_script,
}


def _completed(name: str, command: Command) -> Iterator[CompletedVerb]:
    from flatout.core.registry import ids_of_own

    taken, inner = parameters_of(command), verbs_within(command)
    arguments = [one for one in taken if not one.options]
    names: tuple[str, ...] = tuple(inner)
    if name in ("rules", "levers"):
        names = ids_of_own("rule" if name == "rules" else "lever")
    elif arguments and values_of(arguments[0]):
        names = values_of(arguments[0])
    yield CompletedVerb(
        name,
        _help_of(command.run),
        _shown(taken),
        sum(not one.is_list for one in arguments) if command.takes_script else None,
        names,
    )
    for inner_name, parameters in inner.items():
        yield CompletedVerb(f"{name} {inner_name}", "", _shown(parameters), None, ())


def _shown(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    return tuple(one for one in parameters if one.options and not one.is_hidden)


def _help_of(run: Callable[..., None] | typer.Typer) -> str:
    if isinstance(run, typer.Typer):
        callback = run.registered_callback
        return _shortened(inspect.getdoc(callback.callback) or "" if callback and callback.callback else "")
    return _shortened(inspect.getdoc(run) or "")


def _shortened(text: str) -> str:
    first = " ".join(text.partition("\n\n")[0].split())
    return first if len(first) <= _HELP_LENGTH else f"{first[: _HELP_LENGTH - 3]}..."


def _compgen(option: Parameter) -> str:
    return "-d" if option.metavar == "DIR" else "-f"


def _zsh(text: str) -> str:
    return shlex.quote(text.replace("\\", ""))


def _zsh_arguments(verb: CompletedVerb) -> Iterator[str]:
    yield "'(- *)'{-h,--help}'[Show the help]'"
    for one in verb.options:
        help = _shortened(one.help).replace("[", "(").replace("]", ")").replace(":", ".")
        words = values_of(one)
        action = f"({' '.join(words)})" if words else {"-d": "_files -/", "-f": "_files"}[_compgen(one)]
        value = one.metavar.replace(":", " ") or "value"
        suffix = "" if one.is_flag else f":{value}:{action if words or one.kind == 'path' else ''}"
        for name in one.options:
            form = name if one.is_flag else f"{name}=" if name.startswith("--") else f"{name}+"
            yield _zsh(f"{'*' if one.is_list else ''}{form}[{help}]{suffix}")
    if verb.names:
        yield _zsh(f"1:name:({' '.join(verb.names)})")
    elif verb.num_arguments is not None:
        yield from (_zsh(f"{number + 1}:file:_files") for number in range(verb.num_arguments))
        yield _zsh("*::arguments:_files")
    else:
        yield _zsh("*:file:_files")


def _fish_lines(verbs: Sequence[CompletedVerb]) -> Iterator[str]:
    for option in ROOT_OPTIONS:
        yield f"complete -c flatout -n __fish_use_subcommand {_fish_name(option)}"
    for verb in verbs:
        name, _, inner = verb.name.partition(" ")
        here = f"__fish_seen_subcommand_from {name}" + (f"; and __fish_seen_subcommand_from {inner}" if inner else "")
        if not inner:
            yield f"complete -c flatout -n __fish_use_subcommand -a {name} -d {_fish(verb.help)}"
        if verb.names:
            yield f"complete -c flatout -n {_fish(here)} -a {_fish(' '.join(verb.names))}"
        else:
            yield f"complete -c flatout -n {_fish(here)} -F"
        for one in verb.options:
            words = values_of(one)
            value = "" if one.is_flag else f" -x -a {_fish(' '.join(words))}" if words else " -r -F"
            if one.kind != "path" and not words and not one.is_flag:
                value = " -x"
            spelled = " ".join(_fish_name(option) for option in one.options)
            yield f"complete -c flatout -n {_fish(here)} {spelled}{value} -d {_fish(_shortened(one.help))}"


def _fish_name(option: str) -> str:
    return f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"


def _fish(text: str) -> str:
    """A word in quotes: fish has two escapes within single ones."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_BASH: Final = """\
# Completion of flatout for bash: source <(flatout completion bash)
_flatout_words() {{
    mapfile -t COMPREPLY < <(compgen -W "$1" -- "$current")
}}
_flatout_paths() {{
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen "$1" -- "$current")
}}
_flatout() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" at=1 verb options valued left names word option="" i
    COMPREPLY=()
    while ((at < COMP_CWORD)) && [[ "${{COMP_WORDS[at]}}" == -* ]]; do ((at++)); done
    if ((at >= COMP_CWORD)); then
        _flatout_words "{verbs}"
        [[ "$current" == -* ]] && _flatout_words "{root}"
        return
    fi
    verb="${{COMP_WORDS[at]}}"
    ((at + 1 < COMP_CWORD)) && case "$verb ${{COMP_WORDS[at + 1]}}" in {inner}) verb+=" ${{COMP_WORDS[at + 1]}}" ;; esac
    case "$verb" in
{cases}
        *) return ;;
    esac
    for ((i = at + 1; i < COMP_CWORD; i++)); do
        word="${{COMP_WORDS[i]}}"
        if [[ -n "$option" ]]; then
            [[ "$word" == "=" ]] && continue
            [[ "$option" == -m ]] && ((left--))
            option=""
        elif [[ "$word" == "--" ]]; then
            left=0
        elif [[ "$word" == -?* ]]; then
            [[ "$valued" == *" $word "* ]] && option="$word"
        else
            ((left--))
        fi
        ((left == 0)) && break
    done
    [[ "$current" == "=" ]] && current=""
    if ((left == 0)); then
        _flatout_paths -f # the script's own arguments
    elif [[ -n "$option" ]]; then
        case "$verb $option" in
{values}
        esac
    elif [[ "$current" == -* ]]; then
        _flatout_words "$options"
    elif [[ -n "$names" ]]; then
        _flatout_words "$names"
    else
        _flatout_paths -f
    fi
}}
complete -F _flatout flatout
"""

_ZSH: Final = """\
#compdef flatout
# Completion of flatout for zsh: source <(flatout completion zsh), after compinit
_flatout() {{
    local -a verbs root
    verbs=(
{described}
    )
    root=({root})
    while [[ $words[2] == -* ]] && (( CURRENT > 2 )); do shift words; (( CURRENT-- )); done
    if (( CURRENT == 2 )); then
        if [[ $words[2] == -* ]]; then compadd -a root; else _describe -t verbs verb verbs; fi
        return
    fi
    shift words; (( CURRENT-- ))
    local verb=$words[1]
    if [[ $verb == ({inner}) && $words[2] != -* ]] && (( CURRENT > 2 )); then
        verb="$verb $words[2]"
        shift words; (( CURRENT-- ))
    fi
    case $verb in
{cases}
    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _flatout "$@"; else compdef _flatout flatout; fi
"""
