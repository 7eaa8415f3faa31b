from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.rules.overhead.metrics_one_by_one import RULE


def counting(*, calls: float = 128, backward: bool = False, loops: tuple[int, ...] = (10, 20)) -> EvidenceBuilder:
    """Line 21, in a loop over the samples, compares and reads one prediction; the steps are the loop of line 10."""
    run = EvidenceBuilder()
    run.backward_at(run.line("train.py", 15, "loss.backward()", loops=(10,)))
    line = run.line("train.py", 21, "hits += int(logits[i].argmax() == labels[i])", loops=loops)
    run.operator("aten.argmax", line, inputs=[(10,)], output=(1,), calls=calls, op_s=0.01, python_s=0.01, phase="other")
    if backward:
        run.operator("aten.mul", line, inputs=[(10,)], output=(10,), calls=calls, op_s=0.01, phase="backward")
    run.host_read(line, call="int", calls=calls)
    return run


def test_a_loop_over_the_samples_is_named() -> None:
    finding = only_finding(RULE, counting().build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (21, pytest.approx(0.02))


def test_one_read_a_step_is_left_alone() -> None:
    assert not list(RULE.check(counting(calls=1).build()))


def test_a_loop_that_is_trained_through_is_left_alone() -> None:
    assert not list(RULE.check(counting(backward=True).build()))


def test_the_loop_of_the_steps_is_left_alone() -> None:
    assert not list(RULE.check(counting(loops=(10,)).build()))
