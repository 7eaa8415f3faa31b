from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.distribution_checks import RULE


def test_checks_of_several_lines_are_one_finding_at_the_longest() -> None:
    run = EvidenceBuilder()
    run.use("Distribution.__init__", run.line("ppo.py", 20), 0.004, calls=144, detail="checked", phase="forward")
    run.use(
        "Distribution._validate_sample", run.line("ppo.py", 24), 0.006, calls=144, detail="checked", phase="forward"
    )

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (24, pytest.approx(0.01))
    assert "set_default_validate_args(False)" in finding.edit


def test_distributions_that_check_nothing_are_left_alone() -> None:
    run = EvidenceBuilder()
    run.use("Distribution.__init__", run.line("ppo.py", 20), 0.004, calls=144)
    assert not list(RULE.check(run.build()))


def test_the_operators_of_the_checks_are_claimed_and_those_that_compute_are_not() -> None:
    run = EvidenceBuilder()
    line = run.line("ppo.py", 20, "dist = Normal(mean, std)")
    other = run.line("ppo.py", 21, "kept = mean[mean > 0]")
    run.use("Distribution.__init__", line, 0.004, calls=10, detail="checked", phase="forward")
    checks = [run.operator(op, line, op_s=0.001) for op in ("aten.gt", "aten._is_all_true", "aten._local_scalar_dense")]
    run.operator("aten.mul", line, op_s=0.001)
    run.operator("aten.gt", other, op_s=0.001)
    run.operator("aten.gt", line, op_s=0.001, phase="backward")

    assert only_finding(RULE, run.build()).operators == tuple(checks)


def test_checks_take_no_longer_than_the_phase_they_are_in() -> None:
    run = EvidenceBuilder(forward=0.003, backward=0.09)
    run.use("Distribution.__init__", run.line("ppo.py", 20), 0.004, calls=10, detail="checked", phase="forward")
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.003)


def test_a_policy_that_acts_in_evaluation_mode_is_checked_in_the_phase_without_gradients() -> None:
    run = EvidenceBuilder(evaluation=0.0001, no_grad=0.02)
    run.use("Distribution.__init__", run.line("a2c.py", 201), 0.004, calls=6, detail="checked", phase="evaluation")
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.004)
