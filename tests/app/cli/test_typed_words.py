"""Where the script's own words begin, and what is said of options before and after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command_line import flatout
from typer.main import get_command

from flatout.app.cli.app import app, commands
from flatout.app.cli.parameters import parameters_of, verbs_within
from flatout.app.cli.typed_words import typed_words
from flatout.core.errors import UsageError

COMMANDS = dict(commands())
OF_SCRIPTS = [name for name, command in COMMANDS.items() if command.takes_script]
PRINTS = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PRINTS)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "own", "script", "arguments"),
    [
        ("check train.py --lr 3", "check train.py", "train.py", "--lr 3"),
        ("check --json r.json train.py --json s.json", "check --json r.json train.py", "train.py", "--json s.json"),
        ("check --json=r.json train.py", "check --json=r.json train.py", "train.py", ""),
        ("check train.py -- --lr 3 -- x", "check train.py", "train.py", "-- --lr 3 -- x"),
        ("check --quiet -m pkg.train --lr 3", "check --quiet -m pkg.train", "-m pkg.train", "--lr 3"),
        ("check -mpkg.train x", "check -mpkg.train", "-m pkg.train", "x"),
        ("watch -m pkg.train -m", "watch -m pkg.train", "-m pkg.train", "-m"),
        ("verify before.py --seed 3 after.py --seed 4", "verify before.py --seed 3 after.py", "after.py", "--seed 4"),
        ("verify plan.toml -m pkg.train 7", "verify plan.toml -m pkg.train", "-m pkg.train", "7"),
        ("tune --budget 5m train.py 7", "tune --budget 5m train.py", "train.py", "7"),
        ("--isolated check train.py -h", "--isolated check train.py", "train.py", "-h"),
        ("check -- train.py --lr 3", "check -- train.py --lr 3", "", ""),
        ("report a.json --json b.json", "report a.json --json b.json", "", ""),
        ("check --json", "check --json", "", ""),
        ("nothing --known", "nothing --known", "", ""),
        ("", "", "", ""),
    ],
)
def test_all_that_follows_the_script_is_its_own(words: str, own: str, script: str, arguments: str) -> None:
    typed = typed_words(words.split(), COMMANDS)
    assert (" ".join(typed.own), typed.script, " ".join(typed.arguments)) == (own, script, arguments)
    parsable = typed.parsable(typed.own)
    assert [word for word in parsable if word != "--"] == [word for word in words.split() if word != "--"]


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("train.py --folder x -h --unknown", ["--folder", "x", "-h", "--unknown"]),
        ("train.py -- --folder x", ["--folder", "x"]),
        ("train.py -- -- x", ["--", "x"]),
        ("train.py x -- y", ["x", "--", "y"]),
        ("-m train --help", ["--help"]),
    ],
)
@pytest.mark.slow
def test_a_script_gets_its_words_untouched(words: str, arguments: list[str], folder: Path) -> None:
    ended = flatout("watch", "--folder", "runs", *words.split(), folder=folder)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out) == arguments
    assert (folder / "runs").is_dir() and not (folder / "x").exists()


@pytest.mark.parametrize("verb", OF_SCRIPTS)
def test_an_option_that_a_verb_does_not_have_gets_the_nearest(verb: str, folder: Path) -> None:
    known = next(one.long_option for one in parameters_of(COMMANDS[verb]) if one.long_option)
    wrong = known[:-1] + "x" + known[-1]
    ended = flatout(verb, wrong, "train.py", "train.py", folder=folder)
    assert (ended.code, ended.out) == (2, "")
    assert f"`flatout {verb}` has no option {wrong}; did you mean {known}?" in ended.err


def test_an_option_that_is_near_to_none_is_refused_with_where_options_are_listed(folder: Path) -> None:
    ended = flatout("check", "--zzzz=3", "train.py", folder=folder)
    assert ended.code == 2
    assert (
        "`flatout check` has no option --zzzz; see `flatout check -h`. Options of the script come after it" in ended.err
    )


def test_a_former_name_is_not_the_one_that_is_proposed() -> None:
    with pytest.raises(UsageError, match=r"has no option --md0; see `flatout tune -h`"):
        typed_words(["tune", "--md0", "train.py"], COMMANDS)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("check train.py --json r.json --json=s", "note: --json comes after train.py and goes to it; put it before"),
        ("check train.py --json r --html p", "note: --json, --html come after train.py and go to it; put them before"),
        ("check -m pkg --help", "note: --help comes after -m pkg and goes to it; put it before"),
        ("check train.py --lr 3 -- --json r", ""),
        ("check train.py -- --json r", ""),
        ("check --json r train.py --lr 3", ""),
        ("report r.json --json s.json", ""),
    ],
)
def test_an_option_after_the_script_that_looks_like_ours_is_pointed_out_once(words: str, note: str) -> None:
    found = typed_words(words.split(), COMMANDS).note
    assert found.startswith(note) if note else found == ""
    assert "\n" not in found


def test_the_note_is_one_line_on_standard_error_and_no_error(folder: Path) -> None:
    ended = flatout("watch", "train.py", "--folder", "elsewhere", folder=folder)
    assert ended.code == 0
    assert ended.err.count("note:") == 1
    assert "--folder comes after train.py and goes to it; put it before if meant for flatout" in ended.err


def test_of_several_ranks_the_first_has_the_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert "note:" not in flatout("watch", "train.py", "--folder", "elsewhere", folder=folder).err


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.slow
def test_options_are_those_that_the_parser_has(verb: str) -> None:
    parsed = get_command(app).commands[verb]  # type: ignore[attr-defined]
    expected = {one.name: sorted(word for word in one.opts if word.startswith("-")) for one in parsed.params}
    assert {one.name: sorted(one.options) for one in parameters_of(COMMANDS[verb])} == expected
    assert list(verbs_within(COMMANDS[verb])) == list(getattr(parsed, "commands", {}))
