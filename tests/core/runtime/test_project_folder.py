from __future__ import annotations

from pathlib import Path

import pytest

from flatout.core.runtime.project_folder import MARKERS, project_folder


@pytest.mark.parametrize("marker", MARKERS)
def test_the_nearest_folder_with_a_marker_is_the_project(tmp_path: Path, marker: str) -> None:
    inside = tmp_path / "project" / "examples" / "gan"
    inside.mkdir(parents=True)
    (tmp_path / "setup.py").touch()
    (tmp_path / "project" / marker).touch()
    assert project_folder(inside) == tmp_path / "project"


def test_a_folder_of_no_project_and_a_home_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "home" / "scripts"
    inside.mkdir(parents=True)
    assert project_folder(inside) == inside
    (tmp_path / "home" / ".git").touch()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert project_folder(inside) == inside
