from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError, LeverRefused
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Parameters
from flatout.core.records.workload import Source
from flatout.tune.rewrite.source import find, local_proposals, place_parameters, text_at, with_changes

_TEXT = "for i in range(3):\n    a = i\nb = 2\nc = 3\n"


def _evidence(folder: Path) -> Evidence:
    (folder / "train.py").write_text(_TEXT)
    evidence = EvidenceBuilder().build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(folder))
    return msgspec.structs.replace(evidence, workload=workload)


def _lines(folder: Path, *numbers: int, loops: tuple[int, ...] = ()) -> tuple[Source, ...]:
    return tuple(
        Source(file=str(folder / "train.py"), line=n, function="<module>", loops=loops if n == 2 else ())
        for n in numbers
    )


def _without(text: str, parameters: Parameters) -> str:
    """The statement goes; only `c` may not."""
    place = find(text, parameters)
    if parameters["code"] == "c = 3":
        raise EditError("'c' is wanted")
    return with_changes(place.module, {place.statement: []}).code


@pytest.mark.parametrize(("numbers", "code"), [((2,), "a = i"), ((4, 3), "b = 2")])
def test_the_first_certain_line_of_a_finding_is_offered(tmp_path: Path, numbers: tuple[int, ...], code: str) -> None:
    where, *also = _lines(tmp_path, *numbers)
    finding = msgspec.structs.replace(found(0.01), where=where, also=tuple(also))
    [said] = local_proposals(_evidence(tmp_path), [finding, finding], _without, else_because="nothing")
    assert isinstance(said, Candidate) and said.parameters["code"] == code
    assert said.where == _lines(tmp_path, *numbers)[-1]


def test_what_is_certain_nowhere_is_refused_once_with_the_first_reason(tmp_path: Path) -> None:
    findings = [msgspec.structs.replace(found(0.01), where=w) for w in _lines(tmp_path, 4, 4, 9)]
    with pytest.raises(LeverRefused, match="line 4: 'c' is wanted"):
        list(local_proposals(_evidence(tmp_path), findings, _without, else_because="nothing"))


@pytest.mark.parametrize(
    ("loops", "code"),
    [((True, False), "for i in range(3):"), ((False, True), "a = i"), ((True,), "for i in range(3):")],
)
def test_the_loop_around_a_line_is_tried_in_turn(tmp_path: Path, loops: tuple[bool, ...], code: str) -> None:
    findings = [msgspec.structs.replace(found(0.01), where=w) for w in _lines(tmp_path, 2, loops=(1,))]
    [said] = local_proposals(_evidence(tmp_path), findings, _without, else_because="nothing", loops=loops)
    assert isinstance(said, Candidate) and said.parameters["code"] == code


def test_what_is_saved_is_a_share_of_the_promise_or_of_the_cost(tmp_path: Path) -> None:
    [where] = _lines(tmp_path, 3)
    finding = msgspec.structs.replace(found(0.01), where=where, cost_s=0.1)
    [said] = local_proposals(
        _evidence(tmp_path),
        [finding],
        _without,
        else_because="nothing",
        saved_fraction=(0.5, 2.0),
        cost_fraction=0.3,
    )
    assert isinstance(said, Candidate) and said.saved_s == pytest.approx((0.0025, 0.03))


def _project(tmp_path: Path) -> tuple[Evidence, Source]:
    """A script in a folder of its project, and a line of the package beside that folder."""
    evidence = _evidence(tmp_path / "scripts")
    package = tmp_path / "package"
    package.mkdir()
    (package / "model.py").write_text("def scaled(x):\n    y = 2 * x\n    return y\n")
    return evidence, Source(file=str(package / "model.py"), line=2, function="scaled", text="y = 2 * x")


def test_a_line_elsewhere_in_the_scripts_project_can_be_changed(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "pyproject.toml").touch()
    evidence, line = _project(tmp_path)
    place = place_parameters(evidence, line)
    assert place["file"] == "../package/model.py"
    assert text_at(evidence, place).startswith("def scaled")


def test_a_line_of_no_project_or_of_an_installed_package_cannot(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    evidence, line = _project(tmp_path)
    with pytest.raises(EditError, match="not in the script's project"):
        place_parameters(evidence, line)
    (tmp_path / "setup.cfg").touch()
    installed = tmp_path / ".venv" / "lib" / "python3.11" / "site-packages" / "model.py"
    installed.parent.mkdir(parents=True)
    installed.write_text(Path(line.file).read_text())
    with pytest.raises(EditError, match="not in the script's project"):
        place_parameters(evidence, msgspec.structs.replace(line, file=str(installed)))
