"""Finding what `python -m` runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flatout.core.errors import ScriptError
from flatout.core.runtime.script import load_module, module_file


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "mine"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "train.py").write_text("print(1)\n")
    (package / "deep" / "__init__.py").write_text("")
    (package / "deep" / "__main__.py").write_text("print(2)\n")
    (tmp_path / "alone.py").write_text("print(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "file"),
    [("mine.train", "mine/train.py"), ("mine.deep", "mine/deep/__main__.py"), ("alone", "alone.py")],
)
def test_the_file_of_a_module_is_found_without_importing_its_package(project: Path, name: str, file: str) -> None:
    assert module_file(name) == project / file
    assert "mine" not in sys.modules


@pytest.mark.parametrize("name", ["mine.absent", "absent", "alone.train", "mine", ".train", ""])
def test_a_module_that_is_not_there_is_refused(project: Path, name: str) -> None:
    with pytest.raises(ScriptError, match="cannot be found"):
        module_file(name)


def test_the_folder_that_a_module_is_run_from_is_the_users(project: Path) -> None:
    (project / "mine" / "__init__.py").write_text("")
    script = load_module("mine.train", ())
    assert Path(script.root) == project.resolve()
    assert Path(script.file) == project / "mine" / "train.py"
    assert Path(load_module("json.tool", ()).root) == Path(load_module("json.tool", ()).file).parent
    sys.modules.pop("mine", None)
