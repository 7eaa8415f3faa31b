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
