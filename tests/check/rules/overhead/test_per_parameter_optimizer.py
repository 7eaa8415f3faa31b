from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.per_parameter_optimizer import RULE
from flatout.core.records.trial import TimeOptimizer


def stepping(*, variant: str = "for-loop", step_s: float = 0.03) -> EvidenceBuilder:
    """An Adam made on line 8 of train.py that steps on line 27."""
    run = EvidenceBuilder(optimizer=step_s)
    made, step = run.line("train.py", 8, "optimizer = Adam(net.parameters())"), run.line("train.py", 27)
    run.optimizer(step, constructed=made, variant=variant, step_s=step_s)
    run.operator("aten.addcdiv_", step, op_s=step_s, calls=148, phase="optimizer")
    return run


@pytest.mark.parametrize("variant", ["for-loop", "foreach"])
def test_a_walk_over_the_parameters_is_tried_fused(variant: str) -> None:
    assert proposed(RULE, stepping(variant=variant).build()) == [TimeOptimizer(optimizer=0)]


def test_the_line_that_made_the_optimizer_is_named() -> None:
    run = stepping(step_s=0.03)
    run.tried(TimeOptimizer(optimizer=0), kept=0.2, variant="fused")

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.operators, finding.basis) == (8, (0,), "trial")
    assert "Adam(..., fused=True)" in finding.edit
    assert finding.saved_s[0] < 0.8 * 0.03 < finding.saved_s[1]


def test_a_trial_slower_than_the_scripts_own_step_gives_a_range() -> None:
    """The trial takes 160 ms and leaves 16, the script's step 40 ms: 24 ms go by the seconds that are left, 36 by the share."""
    run = stepping(step_s=0.04)
    run.tried(TimeOptimizer(optimizer=0), kept=0.1, now_s=0.16, variant="fused")
    finding = only_finding(RULE, run.build())
    low_s, high_s = finding.saved_s
    assert low_s < 0.024 < 0.036 < high_s
    assert high_s <= finding.cost_s


def test_the_line_of_the_step_is_named_when_nobody_saw_it_made() -> None:
    run = EvidenceBuilder(optimizer=0.03)
    run.optimizer(run.line("train.py", 27), step_s=0.03)
    run.tried(TimeOptimizer(optimizer=0), kept=0.2, variant="foreach")
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 27


@pytest.mark.parametrize("variant", ["fused", "own"])
def test_an_optimizer_that_does_not_walk_is_left_alone(variant: str) -> None:
    run = stepping(variant=variant)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_short_step_is_left_alone() -> None:
    assert not proposed(RULE, stepping(step_s=0.002).build())


@pytest.mark.parametrize("kept", [1.0, 1.4])
def test_a_few_large_tensors_where_the_trial_shows_no_gain_are_not_reported(kept: float) -> None:
    run = stepping()
    run.tried(TimeOptimizer(optimizer=0), kept=kept)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_optimizers_of_two_classes_are_two_findings() -> None:
    run = EvidenceBuilder(optimizer=0.04)
    for number, name in enumerate(("Adam", "SGD")):
        made, step = run.line("train.py", 8 + number), run.line("train.py", 27 + number)
        run.optimizer(step, constructed=made, name=name, step_s=0.02)
        run.operator("aten.addcdiv_", step, op_s=0.02, calls=148, phase="optimizer")
        run.tried(TimeOptimizer(optimizer=number), kept=0.2, variant="fused")
    assert [f.line for f in diagnose(run.build(), [RULE]).findings] == [8, 9]


def test_optimizers_of_one_class_are_one_finding_priced_by_all_their_calls() -> None:
    run = EvidenceBuilder(optimizer=0.06)
    run.optimizer(run.line("gan.py", 40), constructed=run.line("gan.py", 8), step_s=0.01)
    run.optimizer(run.line("gan.py", 50), constructed=run.line("gan.py", 9), step_s=0.01, calls=5)
    for index in range(2):
        run.tried(TimeOptimizer(optimizer=index), kept=0.2, variant="fused")

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, [s.line for s in finding.also]) == (9, [8])
    assert finding.cost_s == pytest.approx(0.06)
    assert finding.saved_s[0] < 0.8 * 0.06 < finding.saved_s[1]
