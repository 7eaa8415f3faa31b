"""A comparison on a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from flatout.check.compare import ComparedRun, comparison_of
from flatout.core.records.comparison import Comparison, MovedFunction, Ratio, TimeChange
from flatout.core.records.evidence import Evidence, Steps
from flatout.core.records.finding import Diagnosis
from flatout.report.markdown import markdown_report
from flatout.report.parts.compare import comparison_blocks, comparison_headline, decision_line
from flatout.report.text import plain_lines

Render = Callable[..., str]
Golden = Callable[[str, str], None]
change = msgspec.structs.replace


def steps(step_s: float) -> Steps:
    phases = {"data": 0.0091, "forward": 0.0102, "backward": 0.0145, "optimizer": step_s - 0.0338}
    return Steps(
        kind="training",
        num_observed=231,
        num_timed=212,
        step_s=step_s,
        low_s=0.99 * step_s,
        high_s=1.01 * step_s,
        phases=phases,
        phase_intervals={name: (0.98 * s, 1.02 * s) for name, s in phases.items()},
    )


@pytest.fixture
def comparison(evidence: Evidence, diagnosis: Diagnosis) -> Comparison:
    before = ComparedRun(change(evidence, steps=steps(0.0382)), diagnosis)
    first, second, third = diagnosis.findings
    hostile = change(third, rule="overhead.hostile", text="x | `y` <b>\x1b[31m", line=90)
    after = ComparedRun(
        change(
            evidence,
            steps=steps(0.0482),
            workload=change(evidence.workload, torch="2.14.0", command=("train.py", "-v")),
        ),
        change(diagnosis, findings=(change(first, line=60), second, hostile)),
    )
    return comparison_of(before, after, threshold=0.05)


def test_a_slower_run_on_a_terminal(comparison: Comparison, render: Render, golden: Golden) -> None:
    golden("compare", render(comparison_blocks(comparison)))


def test_a_slower_run_as_markdown(comparison: Comparison, golden: Golden) -> None:
    answer, *blocks = comparison_blocks(comparison)
    text = markdown_report([answer, decision_line(comparison), *blocks])

    golden("compare-markdown", text)
    assert "<b>" not in text and "\x1b" not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.count("|") in (5, 6, 7, 8) for line in tables)


def test_a_phase_that_changed_in_a_step_that_did_not_is_named(comparison: Comparison) -> None:
    phases = (
        TimeChange(name="forward", before_s=0.010, after_s=0.016, ratio=Ratio(value=1.6, low=1.5, high=1.7)),
        TimeChange(name="data", before_s=0.005, after_s=0.0),
        TimeChange(name="other", before_s=0.005, after_s=0.005, ratio=Ratio(value=1.0, low=0.9, high=1.1)),
    )
    step = change(comparison.step, after_s=comparison.step.before_s, ratio=Ratio(value=1.0, low=0.98, high=1.02))

    answer, sentence, *_ = plain_lines(comparison_blocks(change(comparison, step=step, phases=phases)))

    assert answer.startswith("No change seen")
    assert sentence == (
        "phases that changed, although the step as a whole did not: forward 10.0 ms -> 16.0 ms, 1.60x; "
        "waiting for data gone, 5.00 ms"
    )


def test_files_that_were_renamed_are_named_once(comparison: Comparison) -> None:
    moved = tuple(MovedFunction(function=f, file_before="a.py", file_after="b.py") for f in ("Net.forward", "<module>"))

    lines = plain_lines(comparison_blocks(change(comparison, moved_functions=moved)))

    assert "matched where they are now: a.py -> b.py" in lines


def test_plain_ascii_where_the_console_has_no_more(comparison: Comparison, render: Render) -> None:
    assert render(comparison_blocks(comparison), encoding="ascii").isascii()


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(value=1.2, low=1.1, high=1.3), "FAIL: slower by more than 5.0 %: 95 % interval of the slowdown +10.0 %"),
        (Ratio(value=1.0, low=0.99, high=1.01), "PASS: not slower by more than 5.0 %"),
        (Ratio(value=1.05, low=1.0, high=1.1), "PASS, cannot tell whether slower by more than 5.0 %"),
        (Ratio(value=1.5), "fewer than six timed steps"),
    ],
)
def test_the_decision_is_one_line_with_its_reason(comparison: Comparison, ratio: Ratio, words: str) -> None:
    from flatout.check.compare import decide

    line = decision_line(
        change(comparison, step=change(comparison.step, ratio=ratio), decision=decide(ratio, 0.05), differences=())
    )

    assert words in line
    assert "\n" not in line


def test_another_torch_is_named_in_the_decision_too(comparison: Comparison) -> None:
    assert "machine or versions differ" in decision_line(comparison)


def test_a_small_but_clear_change_is_called_usual(comparison: Comparison) -> None:
    small = change(comparison.step, ratio=Ratio(value=1.02, low=1.01, high=1.03))

    assert "two runs of one script can differ by so much" in comparison_headline(change(comparison, step=small))
