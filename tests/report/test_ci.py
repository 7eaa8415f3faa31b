"""A comparison for CI systems: what is named, what fails, and what stays silent."""

from __future__ import annotations

import msgspec
import pytest

from flatout.core.records.comparison import (
    Comparison,
    Decision,
    FindingChange,
    LineChange,
    Ratio,
    TimeChange,
)
from flatout.core.records.finding import RankedFinding
from flatout.report.github import Annotation
from flatout.report.parts.ci import comparison_annotations, comparison_cases

change = msgspec.structs.replace

SLOWER = Ratio(value=2.0, low=1.9, high=2.1)
SAME = Ratio(value=1.0, low=0.98, high=1.02)
NEW_LINE = LineChange(
    file="train.py",
    function="<module>",
    text="again = model(x)",
    line_before=None,
    line_after=21,
    before_s=0.0,
    after_s=0.09,
)
FASTER_LINE = change(NEW_LINE, text="y = f(x)", line_before=8, line_after=8, before_s=0.03, after_s=0.01)


def compared(ratio: Ratio, *, lines: tuple[LineChange, ...] = (), threshold: float | None = None) -> Comparison:
    from flatout.check.compare import decide

    return Comparison(
        kind_before="training",
        kind_after="training",
        step=TimeChange(name="step", before_s=0.1, after_s=0.1 * ratio.value, ratio=ratio),
        num_before=50,
        num_after=50,
        phases=(
            TimeChange(name="forward", before_s=0.05, after_s=0.05 * ratio.value, ratio=ratio),
            TimeChange(name="backward", before_s=0.05, after_s=0.05, ratio=SAME),
        ),
        findings=(),
        lines=lines,
        decision=None if threshold is None else decide(ratio, threshold),
    )


def annotations(comparison: Comparison) -> list[Annotation]:
    return list(comparison_annotations(comparison, file_in=lambda file: f"sub/{file}"))


def appeared(finding: RankedFinding, file: str, line: int) -> FindingChange:
    return FindingChange(kind="appeared", before=None, after=change(finding, line=line), file_after=file)


def test_a_slower_step_names_its_slower_lines() -> None:
    whole, line = annotations(compared(SLOWER, lines=(NEW_LINE, FASTER_LINE), threshold=0.05))

    assert (whole.level, whole.file) == ("error", "")
    assert "2.00x slower" in whole.title and "forward 50.0 ms -> 100 ms, 2.00x" in whole.message
    assert (line.level, line.file, line.line) == ("error", "sub/train.py", 21)
    assert "new, 90.0 ms of a step" in line.title
    assert "again = model(x)" in line.message


def test_a_line_that_does_no_more_than_before_is_a_warning_behind_those_that_do() -> None:
    longer = change(NEW_LINE, line_before=8, line_after=8, before_s=0.01, after_s=0.2, ratio=Ratio(value=20.0))
    same = change(longer, calls_before=4.0, calls_after=4.0, flop_before=1e6, flop_after=1e6)
    more_calls = change(same, line_after=30, calls_after=8.0)
    more_flop = change(same, line_after=31, flop_after=2e6)

    _, *lines = annotations(compared(SLOWER, lines=(same, more_calls, more_flop), threshold=0.05))

    assert [(a.line, a.level) for a in lines] == [(30, "error"), (31, "error"), (8, "warning")]
    assert "4 -> 8 operators" in lines[0].message and "1e+06 -> 2e+06 FLOP" in lines[1].message


def test_without_a_decision_to_fail_they_are_warnings() -> None:
    assert {a.level for a in annotations(compared(SLOWER, lines=(NEW_LINE,)))} == {"warning"}
    assert {a.level for a in annotations(compared(SLOWER, lines=(NEW_LINE,), threshold=1.5))} == {"warning"}


@pytest.mark.parametrize("ratio", [SAME, Ratio(value=1.03, low=1.01, high=1.05), Ratio(value=0.5, low=0.4, high=0.6)])
def test_nothing_is_named_where_nothing_became_slower(ratio: Ratio) -> None:
    assert annotations(compared(ratio, lines=(NEW_LINE,), threshold=0.05)) == []


def test_a_slower_phase_names_lines_even_where_the_step_is_the_same() -> None:
    phases = (
        TimeChange(name="forward", before_s=0.04, after_s=0.06, ratio=Ratio(value=1.5, low=1.4, high=1.6)),
        TimeChange(name="backward", before_s=0.06, after_s=0.04, ratio=Ratio(value=0.67, low=0.6, high=0.7)),
    )

    whole, line = annotations(change(compared(SAME, lines=(NEW_LINE,)), phases=phases))

    assert "forward" in whole.message and "backward" not in whole.message
    assert line.line == 21


def test_a_cause_that_appeared_is_told_once_on_the_line_that_it_makes_slower(finding: RankedFinding) -> None:
    findings = (appeared(finding, "train.py", 21), appeared(finding, "net.py", 7))

    _, line, other = annotations(change(compared(SLOWER, lines=(NEW_LINE,)), findings=findings))

    assert finding.title in line.message and finding.edit in line.message
    assert (other.level, other.file, other.line) == ("warning", "sub/net.py", 7)
    assert finding.title in other.title


def results(comparison: Comparison) -> dict[str, str]:
    return {case.name: case.result for case in comparison_cases(comparison)}


def test_the_step_and_the_phases_that_made_it_slower_fail() -> None:
    whole, *phases = comparison_cases(compared(SLOWER, threshold=0.05))

    assert (whole.name, whole.result, whole.seconds) == ("step", "failed", 0.2)
    assert "FAIL: slower by more than 5.0 %" in whole.message
    assert [(p.name, p.result) for p in phases] == [("phase: forward", "failed"), ("phase: backward", "passed")]


@pytest.mark.parametrize(
    ("ratio", "threshold", "result"),
    [(SLOWER, None, "passed"), (SAME, 0.05, "passed"), (Ratio(value=1.05, low=1.0, high=1.1), 0.05, "skipped")],
)
def test_nothing_fails_but_by_the_decision(ratio: Ratio, threshold: float | None, result: str) -> None:
    found = results(compared(ratio, threshold=threshold))

    assert found.pop("step") == result
    assert set(found.values()) == {"passed"}


def test_a_decision_is_what_fails_whatever_the_ratio_says() -> None:
    passed = compared(SLOWER, threshold=0.05)
    assert passed.decision is not None

    unsure = change(passed, decision=Decision(threshold=0.05, outcome="cannot tell"))

    assert results(passed)["step"] == "failed"
    assert results(unsure)["step"] == "skipped"
