"""Defaults of options from `[tool.flatout]` in the nearest pyproject.toml."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command_line import flatout
from tests.evidence_builder import EvidenceBuilder

from flatout.app.cli.app import commands
from flatout.app.cli.plain_run import planned_words
from flatout.app.cli.project_defaults import project_defaults
from flatout.check.diagnosis import diagnose
from flatout.report.json_report import json_report

COMMANDS = dict(commands())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a folder in it, and a script and the Evidence of a run in that."""
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "train.py").write_text("x = 1\n")
    evidence = EvidenceBuilder().build()
    (inner / "run.json").write_bytes(json_report(evidence, diagnose(evidence, ())))
    return inner


def project(folder: Path, text: str) -> None:
    (folder.parent / "pyproject.toml").write_text(f'[project]\nname = "mine"\n{text}')


def test_a_verb_takes_its_own_table_and_the_one_for_all(folder: Path) -> None:
    project(
        folder, '[tool.flatout]\naccuracy-loss = 0.01\ntime-budget = "1h"\n[tool.flatout.tune]\ntime-budget = 300\n'
    )
    found = {verb: project_defaults(verb, COMMANDS, folder=folder).values for verb in ("tune", "shrink", "report")}
    assert found == {
        "tune": {"allowed_loss": "0.01", "budget": "300"},
        "shrink": {"budget": "0.01", "time": "1h"},
        "report": {},
    }


def test_what_is_set_is_in_the_help_and_in_one_line_on_standard_error(folder: Path) -> None:
    project(folder, '[tool.flatout.tune]\ntime-budget = "7m"\n')
    ended = flatout("tune", "-h", folder=folder)
    assert ended.code == 0
    assert "[default: 7m]" in ended.out
    assert ended.err == "note: ../pyproject.toml sets --time-budget 7m\n"


def test_the_file_is_written_where_the_project_says_relative_to_its_file(folder: Path) -> None:
    project(folder, '[tool.flatout.report]\njson = "found.json"\n')
    ended = flatout("report", "run.json", folder=folder)
    assert ended.code == 0, ended.err
    assert "note: ../pyproject.toml sets --json ../found.json" in ended.err
    assert "evidence" in json.loads((folder.parent / "found.json").read_text())


def test_an_option_that_is_typed_wins_and_is_not_in_the_note(folder: Path) -> None:
    project(folder, '[tool.flatout.report]\njson = "found.json"\n')
    ended = flatout("report", "run.json", "--json", "typed.json", folder=folder)
    assert ended.code == 0, ended.err
    assert "note" not in ended.err
    assert (folder / "typed.json").exists() and not (folder.parent / "found.json").exists()


def test_isolated_leaves_the_table_out(folder: Path) -> None:
    project(folder, "[tool.flatout]\nnonsense = 1\n")
    assert flatout("report", "run.json", folder=folder).code == 2
    assert flatout("--isolated", "report", "run.json", folder=folder).code == 0


def test_flags_and_lists_are_set_too(folder: Path) -> None:
    project(folder, '[tool.flatout]\nno-trials = true\nquiet = false\npreload = ["numpy", "json"]\n')
    check, survive = (project_defaults(verb, COMMANDS, folder=folder) for verb in ("check", "survive"))
    assert check.values == {"no_trials": True, "quiet": False}
    assert survive.values == {"preload": ["numpy", "json"]}


def test_an_option_that_must_be_given_may_stand_in_the_project(folder: Path) -> None:
    project(folder, "[tool.flatout.simulate]\ngpus = 1024\n")
    ended = flatout("simulate", "--rate", "-1", folder=folder)
    assert "Missing option" not in ended.err
    assert "note: ../pyproject.toml sets --gpus 1024" in ended.err


def test_a_nearer_file_without_the_table_is_passed_over_and_one_with_it_ends_the_search(folder: Path) -> None:
    project(folder, "[tool.flatout]\nseed = 3\n")
    (folder / "pyproject.toml").write_text('[project]\nname = "inner"\ndependencies = ["flatout"]\n')
    assert project_defaults("verify", COMMANDS, folder=folder).values == {"seed": 3}
    (folder / "pyproject.toml").write_text("[tool.flatout.verify]\nsteps = 4\n")
    assert project_defaults("verify", COMMANDS, folder=folder).values == {"steps": 4}


def test_a_broken_file_that_is_not_ours_is_no_concern(folder: Path) -> None:
    (folder.parent / "pyproject.toml").write_text("[project\n")
    assert flatout("report", "run.json", folder=folder).code == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.flatout]\naccuracy_loss = 1\n", "[tool.flatout] has the unknown key accuracy_loss; did you mean accuracy-loss?"),
        ("[tool.flatout.tune]\ntime-budgt = 1\n", "[tool.flatout.tune] has the unknown key time-budgt; did you mean time-budget"),
        ("[tool.flatout.tnue]\nseed = 1\n", "[tool.flatout] has the unknown key tnue; did you mean tune?"),
        ("[tool.flatout.report]\nseed = 1\n", "[tool.flatout.report] has the unknown key seed"),
        ("[tool.flatout]\nstop = true\n", "[tool.flatout] has the unknown key stop"),
        ('[tool.flatout]\nseconds = "9"\n', "[tool.flatout] seconds = '9' is not what --seconds of `flatout "),
        ("[tool.flatout.check]\nquiet = 1\n", "quiet = 1 is not what --quiet of `flatout check` takes"),
        ("[tool.flatout.check]\njson = true\n", "json = True is not what --json of `flatout check` takes; write a path as text"),
        ("[tool.flatout.verify]\nsteps = 2.5\n", "steps = 2.5 is not what --steps of `flatout verify` takes; write a whole"),
        ('[tool.flatout.survive]\npreload = "numpy"\n', "[tool.flatout.survive] preload = 'numpy' is no list of texts"),
        ("[tool.flatout.tune]\nrun-steps = -1\n", "[tool.flatout.tune] run-steps = -1 is below 0"),
        ("[tool]\nflatout = 3\n", "tool.flatout = 3 is no table"),
        ("[tool.flatout\n", "is no TOML"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_the_file_the_key_and_the_nearest(text: str, message: str, folder: Path) -> None:
    project(folder, text)
    ended = flatout("report", "run.json", folder=folder)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert f"'{folder.parent / 'pyproject.toml'}'" in ended.err
    assert message in ended.err


def test_a_help_is_shown_beside_what_is_wrong(folder: Path) -> None:
    project(folder, "[tool.flatout]\nnonsense = 1\n")
    ended = flatout("tune", "-h", folder=folder)
    assert ended.code == 0
    assert "--time-budget" in ended.out
    assert "has the unknown key nonsense" in ended.err


def test_a_run_that_begins_at_once_looks_for_the_table_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plan.toml").write_text("version = 1\n")
    monkeypatch.chdir(folder)
    words = ["run", "--plan", "plan.toml", "train.py"]
    assert planned_words(words) is not None
    project(folder, '[tool.other]\nwith = "flatout"\n')
    assert planned_words(words) is not None
    for text in ("[tool.flatout.run]\ncheck-after = 20\n", "[tool.flatout\n"):
        project(folder, text)
        assert planned_words(words) is None
