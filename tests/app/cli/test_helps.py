"""The helps of all verbs: short and long, with examples, and with one word for one thing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.command_line import flatout
from typer.main import get_command

from flatout.app.cli.app import app, commands
from flatout.app.cli.former_options import FORMER_OPTIONS
from flatout.app.cli.parameters import Parameter, parameters_of, verbs_within
from flatout.app.cli.typed_words import typed_words

COMMANDS = dict(commands())
VERBS: dict[tuple[str, ...], tuple[Parameter, ...]] = {
    **{(name,): parameters_of(command) for name, command in COMMANDS.items()},
    **{(name, inner): taken for name, command in COMMANDS.items() for inner, taken in verbs_within(command).items()},
}

WORDS = {
    "--json": r"FILE",
    "--html": r"FILE",
    "--markdown": r"FILE",
    "--junit": r"FILE",
    "--trace": r"FILE",
    "--out": r"FILE|DIR",
    "--plan": r"FILE",
    "--model": r"FILE",
    "--folder": r"DIR",
    "--time-budget": r"TIME",
    "--accuracy-loss": r"LOSS",
    "--memory-limit": r"SIZE",
    "--nodes": r"N",
    "--nproc": r"N",
    "--gpus-per-node": r"N",
    "--coordinator": r"HOST:PORT",
    "-m": r"MODULE",
}
"""What a verb has under this name it has with this value."""
OTHER_WORDS = {
    *("--output", "--output-file", "--output-dir", "--into", "--save", "--report", "--dest"),
    *("--md", "--module", "--num-nodes", "--nnodes", "--node", "--ranks", "--nproc-per-node", "--world-size"),
    *("--budget", "--time", "--time-limit", "--memory", "--max-memory", "--allowed-loss", "--max-loss"),
}
"""Names of the same things that no verb has."""


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.slow
def test_a_help_has_each_word_with_its_value(verb: tuple[str, ...]) -> None:
    shown = flatout(*verb, "--help").out
    for parameter in VERBS[verb]:
        for option in parameter.options:
            if option in WORDS:
                assert re.search(rf"{option}\b(\s+-\w)?\s+({WORDS[option]})\s", shown), option


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_no_verb_has_another_word_for_the_same_thing(verb: tuple[str, ...]) -> None:
    options = {option for parameter in VERBS[verb] for option in parameter.options}
    assert not options & (OTHER_WORDS | FORMER_OPTIONS.get(verb[0], {}).keys())
    assert ("-o" in options) == ("--out" in options)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_path_says_whether_it_is_a_file_or_a_folder(verb: tuple[str, ...]) -> None:
    paths = {one.long_option: one.metavar for one in VERBS[verb] if one.kind == "path" and one.options}
    assert set(paths.values()) <= {"FILE", "DIR"}, paths


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_option_says_what_it_is(verb: tuple[str, ...]) -> None:
    assert all(one.help for one in VERBS[verb] if one.options and not one.is_hidden)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
@pytest.mark.slow
def test_a_short_and_a_long_option_show_the_help_with_two_examples_that_can_be_parsed(verb: tuple[str, ...]) -> None:
    short, long = flatout(*verb, "-h"), flatout(*verb, "--help")
    assert (short.code, short.out) == (long.code, long.out) and short.code == 0
    examples = [" ".join(text.split()) for text in re.split(r"\n\s*\n", short.out.partition("Examples:")[2])]
    examples = [example for example in examples if example]
    assert len(examples) >= 2
    command = get_command(app)
    for name in verb:
        command = command.commands[name]  # type: ignore[attr-defined]
    for example in examples:
        program, *words = shlex.split(example.partition(" >")[0])
        assert program == "flatout" and tuple(words[: len(verb)]) == verb
        context = command.make_context(verb[-1], words[len(verb) :])
        assert verb[0] in ("runs", "job") or not context.args


def test_every_option_on_the_pages_is_one_that_the_verb_has() -> None:
    root = Path(__file__).parents[3]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "docs").glob("how-to/*.md")]
    called = [
        (page.name, call.partition(" #")[0].split())
        for page in pages
        for found in re.findall(
            r"^\$? ?(flatout [a-z-]+ [^`|>\n]*)$|`(flatout [a-z-]+ [^`\n]*)`", page.read_text(), re.MULTILINE
        )
        for call in found
        if call and call.split()[1] in COMMANDS
    ]
    assert len(called) > 40
    for page, (_, *words) in called:
        typed = typed_words([word for word in words if word != "..."], COMMANDS)
        within = verbs_within(COMMANDS[typed.verb])
        parameters = within.get(words[1] if len(words) > 1 else "", parameters_of(COMMANDS[typed.verb]))
        options = {option for taken in parameters for option in taken.options} | {"-h", "--help"}
        own = typed.own[: typed.own.index("--")] if "--" in typed.own else typed.own  # the script's come behind it
        used = {word.partition("=")[0] for word in own if word.startswith("-")}
        assert used <= options | {"--"} and not typed.misplaced, f"{page}: flatout {' '.join(words)}"
