"""Where a verb writes: checked before anything runs, and nothing is destroyed or lost in the end."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from tests.command_line import flatout
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.report.json_report import json_report

PATHS = {
    "nowhere/r.json": "there is no folder",
    "folder": "it is a folder; give the path of a file in it",
    "folder/": "it is a folder; give the path of a file in it",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the Evidence of a run, and a folder in it."""
    (tmp_path / "folder").mkdir()
    evidence = EvidenceBuilder().build()
    (tmp_path / "run.json").write_bytes(json_report(evidence, diagnose(evidence, ())))
    return tmp_path


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_cannot_be_written_is_refused_before_anything_runs(path: str, folder: Path) -> None:
    ended = flatout("report", "missing.json", "--json", path, folder=folder)
    assert ended.code == 2
    assert f"--json {path.rstrip('/')}: {PATHS[path]}" in ended.err
    assert "missing.json" not in ended.err


def test_two_outputs_at_one_place_are_refused(folder: Path) -> None:
    (folder / "latest").symlink_to(folder / "a.json")
    ended = flatout("report", "run.json", "--json", "a.json", "--html", "latest", folder=folder)
    assert ended.code == 2
    assert "--html latest: --json goes there, too; give two paths" in ended.err


def test_a_folder_that_may_not_be_written_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **options: not mode & os.W_OK)  # root may
    ended = flatout("report", "run.json", "--json", "a.json", folder=folder)
    assert ended.code == 2
    assert "may not be written to" in ended.err


def test_devices_are_written_to_and_stay(folder: Path) -> None:
    ended = flatout("report", "run.json", "--json", os.devnull, "--html", os.devnull, folder=folder)
    assert ended.code == 0, ended.err
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_dash_puts_the_file_on_standard_output_and_the_report_on_standard_error(folder: Path) -> None:
    ended = flatout("report", "run.json", "--json", "-", folder=folder)
    assert ended.code == 0, ended.err
    assert "evidence" in json.loads(ended.out)
    assert "a training step" in ended.err
    assert not (folder / "-").exists()


MODELS = Path(__file__).parents[3] / "examples" / "models"
SCALE = ("scale", "--model", MODELS / "llama-70b.toml", "--gpus", "64xh100-sxm", "--batch", "1M-tokens", "--top", "2")
FIT = ("fit", "--model", MODELS / "llama-70b.toml")
SIMULATE = ("simulate", "--gpus", "1024")


@pytest.fixture
def few_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking itself has tests of its own."""
    monkeypatch.setattr("flatout.scale.search._MOST_PLAYED", 20)


@pytest.mark.slow
@pytest.mark.usefixtures("few_played")
@pytest.mark.parametrize(
    ("command", "option", "begins", "shown"),
    [
        (SCALE, "--out", "# llama-70b on 64xh100-sxm", "predicted from data sheets"),
        (SCALE, "--html", "<!DOCTYPE html>", "predicted from data sheets"),
        (FIT, "--html", "<!DOCTYPE html>", "stage 0:"),
        (SIMULATE, "--html", "<!DOCTYPE html>", "1,024 devices"),
    ],
)
def test_a_dash_of_a_planning_verb_puts_the_file_alone_on_standard_output(
    command: tuple[object, ...], option: str, begins: str, shown: str, folder: Path
) -> None:
    ended = flatout(*command, option, "-", folder=folder)
    assert ended.code == 0, ended.err
    assert ended.out.lower().startswith(begins.lower())
    assert shown in ended.err and shown not in ended.out.partition("\n")[0]
    assert "written to" not in ended.out + ended.err
    assert not (folder / "-").exists()
    written = flatout(*command, option, "file", folder=folder)
    assert (folder / "file").read_text() == ended.out
    assert shown in written.out and "written to file" in written.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("build m:f --out -", "--out -: a folder does not go to standard output"),
        ("shrink m:f --metric m:g --out -", "--out -: a folder does not go to standard output"),
        ("edit --plan plan.toml --out - train.py", "--out -: a folder does not go to standard output"),
        ("edit --plan plan.toml --rest - train.py", "--rest -: the diff goes to standard output"),
        ("edit --plan plan.toml --out no/such train.py", "there is no folder"),
    ],
)
def test_what_cannot_go_to_standard_output_is_refused(words: str, message: str, folder: Path) -> None:
    (folder / "train.py").write_text("x = 1\n")
    ended = flatout(*words.split(), folder=folder)
    assert ended.code == 2
    assert message in ended.err
