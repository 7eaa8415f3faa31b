from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.gradients_filled import RULE


def filling(*, detail: str = "set_to_none=False", adds: float = 148) -> EvidenceBuilder:
    """zero_grad on line 30 of train.py fills 148 gradients; the backward adds to them `adds` times."""
    run = EvidenceBuilder()
    run.optimizer()
    line = run.line("train.py", 30, "optimizer.zero_grad(set_to_none=False)")
    run.use("Optimizer.zero_grad", line, 0.004, detail=detail)
    if detail.endswith("False"):
        run.operator("aten.zero_", line, inputs=[(512, 512)], output=(512, 512), calls=148, op_s=0.004, phase="other")
    backward = run.line("train.py", 31, "loss.backward()")
    run.operator(
        "aten.add_",
        backward,
        inputs=[(512, 512)],
        output=(512, 512),
        calls=adds,
        op_s=0.006,
        phase="backward",
        module="",
    )
    return run


def test_fills_and_the_additions_they_cause_are_named() -> None:
    finding = only_finding(RULE, filling().build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (30, pytest.approx(0.010))


def test_additions_of_several_micro_batches_stay() -> None:
    assert only_finding(RULE, filling(adds=4 * 148).build()).cost_s == pytest.approx(0.004 + 0.006 / 4)


def test_gradients_that_are_dropped_are_left_alone() -> None:
    assert not list(RULE.check(filling(detail="set_to_none=True").build()))
