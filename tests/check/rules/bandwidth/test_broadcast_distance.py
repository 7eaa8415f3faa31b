from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.bandwidth.broadcast_distance import RULE
from flatout.core.records.trial import TimeDistance


def distances(*, num: int = 300, dim: int = 64, is_direction_used: bool = False) -> EvidenceBuilder:
    """Differences of all pairs, squared and added up, with a backward: 30 ms of a step of 100."""
    run = EvidenceBuilder()
    line = run.line("train.py", 10, "d = ((a[:, None] - b[None]) ** 2).sum(-1)")
    whole = (num, num, dim)
    difference = run.operator("aten.sub", line, inputs=[(num, 1, dim), (1, num, dim)], output=whole, op_s=0.006)
    square = run.operator("aten.pow", line, inputs=[whole], output=whole, op_s=0.006)
    total = run.operator("aten.sum", line, inputs=[whole], output=(num, num), op_s=0.006)
    gradient = run.operator("aten.mul", line, inputs=[whole], output=whole, op_s=0.012, phase="backward")
    first = run.call(difference)
    squared = run.call(square, first)
    run.call(total, squared)
    run.call(gradient, first)
    if is_direction_used:
        other = run.line("train.py", 11, "unit = (a[:, None] - b[None]) / d")
        run.call(run.operator("aten.div", other, inputs=[whole], output=whole, op_s=0.006), first)
    return run


def test_the_difference_is_tried_against_cdist() -> None:
    run = distances()

    trials = proposed(RULE, run.build())

    assert trials == [TimeDistance(batch=1, num_a=300, num_b=300, dim=64, dtype="float32", backward=True)]


def test_forward_and_backward_of_the_line_are_claimed() -> None:
    run = distances()
    run.tried(*proposed(RULE, run.build()), kept=0.1)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 10
    assert finding.cost_s == pytest.approx(0.03)
    assert finding.saved_s[0] < 0.9 * 0.03
    assert finding.saved_s[1] == pytest.approx(0.9 * 0.03)


def test_differences_that_are_used_for_their_direction_are_left_alone() -> None:
    assert not proposed(RULE, distances(is_direction_used=True).build())


def test_a_difference_with_a_single_point_is_no_distance_of_all_pairs() -> None:
    assert not proposed(RULE, distances(num=2).build())
