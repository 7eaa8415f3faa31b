"""A plan as changes of text: which files, in which order, what stays, what is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from flatout.core.errors import PlanError, RecordError
from flatout.core.records.lever import Parameter, Parameters, PlannedLever
from flatout.core.records.plan import Plan
from flatout.tune.edits import Edits, edits
from flatout.tune.rewrite.source import changed_places, several_places

SCRIPT = """\
import torch
from torch import nn

from parts import made

torch.autograd.set_detect_anomaly(True)
net = nn.Linear(3, 2)
optimizer = made(net)
optimizer.zero_grad(set_to_none=False)
"""
PARTS = """\
import torch


def made(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)
"""


def planned(id: str, **parameters: Parameter) -> PlannedLever:
    return PlannedLever(id=id, guarantee="exact", parameters=parameters)


DEBUG_OFF = planned("graph.debug-off")
TO_NONE = planned("memory.gradients-to-none")
FUSED = planned("parallelism.fused-optimizer")
FUSED_IN_PARTS = planned("parallelism.fused-optimizer", file="parts.py")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def edits_of(script: Path, *levers: PlannedLever) -> Edits:
    return edits(Plan(script="train.py", arguments=("--fast",), lever=levers), script)


@pytest.mark.slow
def test_the_diff_of_all_files_is_what_patch_takes(script: Path) -> None:
    found = edits_of(script, DEBUG_OFF, FUSED_IN_PARTS, TO_NONE)
    assert not found.stayed
    subprocess.run(
        ["patch", "-p1"], input=found.diff().encode(), cwd=script.parent, check=True, stdout=subprocess.DEVNULL
    )
    assert "anomaly" not in script.read_text()
    assert "optimizer.zero_grad()\n" in script.read_text()
    assert "lr=0.1, fused=True)" in (script.parent / "parts.py").read_text()


@pytest.mark.slow
def test_what_has_no_certain_edit_stays_in_the_plan_with_its_reason(script: Path) -> None:
    found = edits_of(script, FUSED, DEBUG_OFF)
    [(lever, because)] = found.stayed
    assert lever is FUSED and "no call" in because
    assert found.rest.lever == (FUSED,) and found.rest.arguments == ("--fast",)
    assert [file.name for file in found.files] == ["train.py"]


@pytest.mark.slow
def test_a_lever_changes_all_of_its_files_or_none(script: Path) -> None:
    (script.parent / "more.py").write_text(PARTS.replace("0.1", "0.2"))
    found = edits_of(script, planned("parallelism.fused-optimizer", files=("parts.py", "more.py")))
    assert not found.stayed
    assert {file.name: "fused=True" in file.after for file in found.files} == {"parts.py": True, "more.py": True}
    half = edits_of(script, planned("parallelism.fused-optimizer", files=("parts.py", "train.py")))
    assert [s.because for s in half.stayed] and not half.files


def test_a_plan_names_several_places_of_a_lever_in_words_that_are_read_again() -> None:
    places: list[Parameters] = [
        {"file": "a.py", "function": "Trainer.run", "code": "loader = DataLoader({1: 2}[1])"},
        {},
        {"file": "b/c.py", "function": "<module>", "code": "x: Any = DataLoader(d)"},
        {"file": "a.py", "function": "Trainer.run", "code": "loader = DataLoader({1: 2}[1])"},
    ]
    parameters = several_places(places)
    assert parameters["also"] == ("b/c.py: <module>: x: Any = DataLoader(d)",)
    found = [{name: one[name] for name in ("file", "function", "code")} for one in changed_places(parameters)]
    assert found == [places[0], places[2]]
    assert several_places([{}, {}]) == {}


@pytest.mark.slow
def test_written_in_place_the_files_are_as_the_diff_says_and_keep_their_mode(script: Path) -> None:
    script.chmod(0o755)
    found = edits_of(script, DEBUG_OFF)
    assert found.write() == (script,)
    gone = ("torch.autograd.set_detect_anomaly(True)\n", "import torch\n")  # which nothing uses any more
    assert script.read_text() == SCRIPT.replace(gone[0], "").replace(gone[1], "")
    assert script.stat().st_mode & 0o777 == 0o755
    assert sorted(p.name for p in script.parent.iterdir()) == ["parts.py", "train.py"]


@pytest.mark.slow
def test_written_elsewhere_the_originals_stay(script: Path, tmp_path: Path) -> None:
    edits_of(script, DEBUG_OFF).write(tmp_path / "edited" / "here")
    assert script.read_text() == SCRIPT
    assert "anomaly" not in (tmp_path / "edited" / "here" / "train.py").read_text()


@pytest.mark.slow
def test_a_plan_of_another_text_is_not_written_in_place(script: Path) -> None:
    gone = planned("memory.gather-once", file="train.py", function="main", code="bank = torch.cat([bank, features])")
    found = edits_of(script, DEBUG_OFF, gone)
    with pytest.raises(PlanError, match="another text"):
        found.write()
    assert script.read_text() == SCRIPT


@pytest.mark.parametrize("name", ["../train.py", "/etc/hosts"])
def test_a_file_outside_of_the_folder_is_refused(script: Path, name: str) -> None:
    with pytest.raises(PlanError, match="not in the script's project"):
        edits_of(script, planned("graph.debug-off", file=name))


@pytest.fixture
def script_of_project(tmp_path: Path) -> Path:
    """A script in a folder of its project, beside the folder of what it imports."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "setup.py").touch()
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    return tmp_path / "scripts" / "train.py"


def test_a_file_elsewhere_in_the_project_is_changed_and_named_from_the_project(script_of_project: Path) -> None:
    project = script_of_project.parent.parent
    found = edits_of(script_of_project, DEBUG_OFF, planned("parallelism.fused-optimizer", file="../parts.py"))
    assert not found.stayed
    assert found.folder == project
    assert [file.name for file in found.files] == ["scripts/train.py", "parts.py"]
    subprocess.run(["patch", "-p1"], input=found.diff(), text=True, cwd=project, check=True, capture_output=True)
    assert "fused=True" in (project / "parts.py").read_text()
    assert "anomaly" not in script_of_project.read_text()
    found.write(project / "copies")
    assert sorted(str(p.relative_to(project / "copies")) for p in (project / "copies").rglob("*.py")) == [
        "parts.py",
        "scripts/train.py",
    ]


def test_names_stay_those_of_the_scripts_folder_where_no_file_lies_outside(script_of_project: Path) -> None:
    found = edits_of(script_of_project, DEBUG_OFF)
    assert [file.name for file in found.files] == ["train.py"]
    assert found.folder == script_of_project.parent


def test_a_file_outside_of_the_project_is_refused(script_of_project: Path) -> None:
    with pytest.raises(PlanError, match="not in the script's project"):
        edits_of(script_of_project, planned("graph.debug-off", file="../../parts.py"))


def test_a_file_that_is_not_there_leaves_its_lever_in_the_plan(script: Path) -> None:
    [(_, because)] = edits_of(script, planned("graph.debug-off", file="gone.py")).stayed
    assert "gone.py" in because
    with pytest.raises(RecordError, match=r"none\.py"):
        edits_of(script.with_name("none.py"), DEBUG_OFF)


@pytest.mark.slow
def test_line_ends_encoding_and_a_missing_last_one_are_kept(script: Path) -> None:
    data = (
        dedent("""\
        # -*- coding: latin-1 -*-
        import torch
        name = "\xe9"
        torch.autograd.set_detect_anomaly(True)
        last = 1""")
        .replace("\n", "\r\n")
        .encode("latin-1")
    )
    script.write_bytes(data)
    edits_of(script, DEBUG_OFF).write()
    gone = (b"torch.autograd.set_detect_anomaly(True)\r\n", b"import torch\r\n")
    assert script.read_bytes() == data.replace(gone[0], b"").replace(gone[1], b"")


@pytest.mark.slow
def test_a_diff_at_a_last_line_without_an_end_is_one_that_patch_takes(script: Path) -> None:
    script.write_text("import torch\nx = torch.zeros(1)\ntorch.autograd.set_detect_anomaly(True)")
    diff = edits_of(script, DEBUG_OFF).diff()
    subprocess.run(["patch", "-p1"], input=diff.encode(), cwd=script.parent, check=True, stdout=subprocess.DEVNULL)
    assert script.read_text().rstrip("\n") == "import torch\nx = torch.zeros(1)"
