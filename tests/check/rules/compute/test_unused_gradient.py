from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.unused_gradient import RULE
from flatout.core.records.trial import TimeModel


def half_trained(*, seconds: float = 0.03) -> EvidenceBuilder:
    """The backward of a body that no optimizer trains takes `seconds`; a second, smaller model trains as well."""
    run = EvidenceBuilder(forward=0.04, backward=0.05)
    body = run.line("model.py", 14, "h = self.body(x)")
    row = run.operator("aten.mm", body, op_s=seconds, phase="backward", module="Net.body")
    run.model(run.line("train.py", 18), name="Scorer", call_s=0.001)
    run.model(run.line("train.py", 20), call_s=0.04)
    run.unused_gradient(body, operators=(row,), seconds=seconds)
    return run


def test_the_largest_trained_model_is_tried_with_the_body_frozen() -> None:
    assert proposed(RULE, half_trained().build()) == [TimeModel(model=1, variant="frozen", backward=True)]


def test_the_frozen_body_is_named_where_it_is_called() -> None:
    run = half_trained(seconds=0.03)
    run.tried(*proposed(RULE, run.build()), kept=0.7)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.module, finding.operators) == (14, "Net.body", (0,))
    assert finding.basis == "trial"
    assert finding.saved_s[0] < 0.3 * (0.04 + 0.05) < finding.saved_s[1]


def test_without_a_trial_the_backward_seen_is_the_estimate() -> None:
    finding = only_finding(RULE, half_trained(seconds=0.03).build())
    assert finding.basis == "estimate"
    assert finding.saved_s[1] == pytest.approx(0.03)


def test_a_trial_without_gain_is_not_reported() -> None:
    run = half_trained()
    run.tried(*proposed(RULE, run.build()), kept=1.02)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_short_backward_is_not_worth_a_trial() -> None:
    run = half_trained(seconds=0.001)
    assert not proposed(RULE, run.build())
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_model_trained_whole_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20))
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def taught(*, seconds: float = 0.02) -> EvidenceBuilder:
    """A teacher of the student's class is run with gradients on."""
    run = EvidenceBuilder(forward=0.05, backward=0.04)
    line = run.line("train.py", 61, "probs = self.teacher(views).softmax(1)")
    row = run.operator("aten.mm", line, op_s=seconds, phase="backward", module="Net (2).body")
    run.model(run.line("train.py", 66), call_s=0.04)
    run.model(line, name="Net (2)", call_s=0.01, is_training=False)
    run.unused_gradient(line, operators=(row,), seconds=seconds, module="Net (2).body", is_whole=True)
    return run


def test_a_module_that_is_not_trained_at_all_is_tried_without_a_graph() -> None:
    run = taught()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeModel(model=1, variant="without-graph", backward=True)
    run.tried(trial, kept=0.25)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.module) == (61, "Net (2)")
    assert sum(finding.saved_s) / 2 == pytest.approx(0.75 * (0.01 + 0.02)), "its forward and backward"
    assert "no_grad" in finding.edit


def test_a_module_that_a_gradient_goes_through_is_not_put_under_no_grad() -> None:
    run = taught()
    run.refused(*proposed(RULE, run.build()), why="a gradient goes through the module to its inputs")

    edit = only_finding(RULE, run.build()).edit

    assert "requires_grad_(False)" in edit
    assert "no_grad" not in edit


def test_a_teacher_under_no_grad_has_no_gradients_to_tell() -> None:
    run = taught()
    run.unused_gradients.clear()
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))
