"""The commands of tests/typed_commands.py that start no training, typed in this process, and its script as a person runs it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from tests import typed_commands
from tests.command_line import flatout
from tests.evidence_builder import EvidenceBuilder
from tests.typed_commands import CASES, Case, Typed, complaints, judged, types

from flatout.check.diagnosis import diagnose
from flatout.report.json_report import json_report


@pytest.fixture(scope="module")
def evidence() -> bytes:
    found = EvidenceBuilder().build()
    return json_report(found, diagnose(found, ()))


def in_this_process(case: Case, folder: Path) -> Typed:
    """Type a command where flatout is imported already."""
    return Typed(*flatout(*case.words.split(), folder=folder / case.folder))


@pytest.mark.parametrize("case", [case for case in CASES if not case.trains], ids=lambda case: case.words or "nothing")
@pytest.mark.slow
def test_a_command_does_what_is_expected_of_it(case: Case, evidence: bytes) -> None:
    found, typed = judged(case, in_this_process, evidence)
    assert not found, typed


@pytest.mark.slow
@pytest.mark.long
def test_commands_are_typed_in_processes_of_their_own_too(evidence: bytes) -> None:
    for words in ("watch early.py", "fit"):
        case = next(case for case in CASES if case.words == words)
        found, typed = judged(case, types([sys.executable, "-m", "flatout"]), evidence)
        assert not found, typed


def test_each_thing_that_is_not_as_expected_is_named(tmp_path: Path) -> None:
    (tmp_path / "-").touch()
    case = Case("check", 2, out="a report | a line", err="a note", files="r.json")
    assert complaints(case, Typed(0, "a report", "Traceback"), tmp_path) == [
        "exit code 0, not 2",
        "output lacks 'a line'",
        "standard error lacks 'a note'",
        "a traceback",
        "no file r.json",
        "a file named -",
    ]


def test_the_script_needs_python_alone() -> None:
    tree = ast.parse(Path(typed_commands.__file__).read_text())
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
