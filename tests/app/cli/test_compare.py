"""`flatout compare`: its options, its errors, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from tests.command_line import Ended, flatout
from tests.evidence_builder import EvidenceBuilder

from flatout.check.diagnosis import diagnose
from flatout.core.records.comparison import Comparison
from flatout.core.records.record import from_json
from flatout.report.json_report import json_report


def write(path: Path, step_s: float) -> Path:
    evidence = EvidenceBuilder(step_s=step_s, noise_s=0.01 * step_s).build()
    path.write_bytes(json_report(evidence, diagnose(evidence, ())))
    return path


def compare(*arguments: object) -> Ended:
    return flatout("compare", *arguments)


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write(tmp_path / "before.json", 0.1)


@pytest.mark.parametrize(
    ("step_s", "limit", "code", "words"),
    [
        (0.2, "5%", 1, "FAIL: slower"),
        (0.2, "0.05", 1, "FAIL: slower"),
        (0.2, "150 %", 0, "PASS: not slower"),
        (0.105, "5%", 0, "PASS, cannot tell"),
    ],
)
def test_the_exit_code_is_the_decision(
    before: Path, tmp_path: Path, step_s: float, limit: str, code: int, words: str
) -> None:
    ran = compare(before, write(tmp_path / "after.json", step_s), "--fail-if-slower", limit)

    assert ran.code == code, ran.err
    [line] = [line for line in ran.out.splitlines() if words in line]
    assert "interval" in line


def test_without_a_threshold_a_slower_run_is_no_failure(before: Path, tmp_path: Path) -> None:
    ran = compare(before, write(tmp_path / "after.json", 0.2))

    assert ran.code == 0, ran.err
    assert "2.00x slower" in ran.out


def test_json_and_markdown_are_written(before: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "out.md"

    ran = compare(before, before, "--json", out, "--markdown", page)

    assert ran.code == 0, ran.err
    assert from_json(out.read_bytes(), Comparison).step.ratio is not None
    assert page.read_text().startswith("**No change seen")


@pytest.mark.parametrize("limit", ["five", "-1%", "nan", "5"])
def test_a_threshold_that_is_none_is_one_clear_line(before: Path, limit: str) -> None:
    ran = compare(before, before, f"--fail-if-slower={limit}")

    assert ran.code == 2
    assert "--fail-if-slower" in ran.err and "5%" in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "the file is empty"),
        ("{", "cut short"),
        (json.dumps({"a": 1}), "neither a flatout report nor Evidence"),
    ],
)
def test_a_bad_file_is_named_in_one_clear_line(before: Path, tmp_path: Path, content: str | None, words: str) -> None:
    after = tmp_path / "after.json"
    if content is not None:
        after.write_text(content)

    ran = compare(before, after)

    assert ran.code == 2
    assert "after.json" in ran.err and words in ran.err
    assert "Traceback" not in ran.err


def test_a_run_without_steps_is_bad_input(before: Path, tmp_path: Path) -> None:
    ran = compare(before, write(tmp_path / "after.json", 0.0), "--fail-if-slower", "5%")

    assert ran.code == 2
    assert "the run after has no timed step" in ran.err


def with_line(path: Path, cwd: Path, seconds: float, *, calls: float) -> Path:
    """A run in `cwd` of which one line of net.py takes so long, for so many operators."""
    builder = EvidenceBuilder(step_s=0.05 + seconds, noise_s=0.001)
    builder.operator("aten.mm", builder.line("net.py", 7, "y = slow(x)", function="forward"), op_s=seconds, calls=calls)
    evidence = builder.build()
    workload = msgspec.structs.replace(evidence.workload, cwd=str(cwd))
    sources = tuple(msgspec.structs.replace(s, file=str(cwd / Path(s.file).name)) for s in evidence.sources)
    evidence = msgspec.structs.replace(evidence, workload=workload, sources=sources)
    path.write_bytes(json_report(evidence, diagnose(evidence, ())))
    return path


def test_annotations_name_the_line_within_the_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "repository"))
    one = with_line(tmp_path / "one.json", tmp_path / "base" / "sub", 0.01, calls=1)
    two = with_line(tmp_path / "two.json", tmp_path / "repository" / "sub", 0.06, calls=6)

    ran = compare(one, two, "--fail-if-slower", "5%", "--github")

    assert ran.code == 1, ran.err
    commands = [line for line in ran.out.splitlines() if line.startswith("::")]
    assert len(commands) == 2
    assert commands[0].startswith("::error title=")
    assert commands[1].startswith("::error file=sub/net.py,line=7,title=")
    assert ran.out.splitlines()[-1].startswith("FAIL")


def test_annotations_leave_standard_output_to_a_file_that_takes_it(before: Path, tmp_path: Path) -> None:
    ran = compare(before, write(tmp_path / "after.json", 0.2), "--github", "--json", "-")

    assert from_json(ran.out.encode(), Comparison).step.ratio is not None
    assert "\n::warning title=" in ran.err


def test_an_unchanged_run_has_no_annotations(before: Path) -> None:
    assert "::" not in compare(before, before, "--github", "--fail-if-slower", "5%").out


def test_junit_fails_where_the_exit_code_does(before: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.xml"

    ran = compare(before, write(tmp_path / "after.json", 0.2), "--fail-if-slower", "5%", "--junit", out)

    [suite] = ElementTree.parse(out).getroot()
    assert ran.code == 1
    assert suite.get("failures") != "0"
    assert suite.find("testcase[@name='step']/failure") is not None
