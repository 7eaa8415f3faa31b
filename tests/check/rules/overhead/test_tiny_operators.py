from __future__ import annotations

import pytest
from tests.evidence_builder import MACHINE, EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.tiny_operators import RULE
from flatout.core.records.trial import TimeModel


def small_batch(
    *, num_operators: int = 10_000, op_s: float = 4 * MACHINE.dispatch_s, device_s: float | None = None
) -> EvidenceBuilder:
    """A model called on line 24 of train.py, most of whose step goes to `num_operators` operators of `op_s` seconds."""
    run = EvidenceBuilder(device_s=device_s, forward=0.043, backward=0.055, optimizer=0.0, other=0.0)
    run.model(run.line("train.py", 24))
    run.operator("aten.add", run.line("model.py", 12), calls=num_operators, op_s=num_operators * op_s, python_s=0.002)
    return run


def batched(factor: int) -> TimeModel:
    return TimeModel(model=0, variant="batched", backward=True, factor=factor)


def test_the_batch_is_tried_repeated() -> None:
    assert proposed(RULE, small_batch().build()) == [batched(4), batched(8)]


def test_a_batch_that_takes_hardly_longer_when_repeated_is_too_small() -> None:
    run = small_batch()
    run.tried(batched(4), kept=0.3)
    run.tried(batched(8), kept=0.2)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (24, "trial")
    assert finding.saved_s == pytest.approx((0.7 * 0.098, 0.8 * 0.098))


def test_a_larger_batch_is_advice_and_no_gain() -> None:
    run = small_batch()
    run.tried(batched(4), kept=0.3)
    run.tried(batched(8), kept=0.2)

    diagnosis = diagnose(run.build(), [RULE])

    (finding,) = diagnosis.findings
    assert "changes the experiment" in finding.advice
    assert finding.gain == (1.0, 1.0)
    assert finding.throughput[0] > 2.0
    assert (finding.cost_s, diagnosis.explained_s) == (0.0, 0.0)


def test_large_operators_are_left_alone() -> None:
    run = small_batch(num_operators=60, op_s=0.0015)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_step_of_few_large_operators_is_left_alone() -> None:
    run = small_batch(num_operators=100)
    run.operator("aten.mm", run.line("model.py", 13), calls=10, op_s=0.09)
    assert not proposed(RULE, run.build())


def test_a_batch_that_cannot_grow_is_left_alone() -> None:
    run = small_batch()
    run.refused(batched(4), batched(8), why="the inputs have no batch dimension in common")
    assert not list(RULE.check(run.build()))


def test_a_batch_that_takes_as_much_longer_as_it_is_larger_is_not_reported() -> None:
    run = small_batch()
    run.tried(batched(4), batched(8), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_host_time_beside_a_busy_device_is_left_alone() -> None:
    assert not proposed(RULE, small_batch(device_s=0.098).build())


def test_it_is_general_since_it_names_a_symptom() -> None:
    assert RULE.is_general


@pytest.mark.parametrize("phase", ["environment", "rollout", "no_grad", "data"])
def test_phases_that_grow_with_the_samples_are_not_gained(phase: str) -> None:
    gained = []
    for seconds in (0.0, 0.04):
        run = EvidenceBuilder(forward=0.03, backward=0.03, other=0.04 - seconds, optimizer=0.0, **{phase: seconds})
        run.model(run.line("train.py", 24))
        run.operator("aten.add", run.line("model.py", 12), calls=10_000, op_s=4e4 * MACHINE.dispatch_s)
        run.tried(batched(4), kept=0.3)
        run.tried(batched(8), kept=0.2)
        gained.append(only_finding(RULE, run.build()).saved_s[1])
    assert gained[1] < gained[0]


def test_more_environments_are_advised_where_samples_come_from_them() -> None:
    run = EvidenceBuilder(forward=0.043, backward=0.045, environment=0.01, optimizer=0.0, other=0.0)
    run.model(run.line("train.py", 24))
    run.operator("aten.add", run.line("model.py", 12), calls=10_000, op_s=4e4 * MACHINE.dispatch_s, python_s=0.002)
    run.tried(batched(4), kept=0.3)
    run.tried(batched(8), kept=0.2)
    assert "environments hand out" in only_finding(RULE, run.build()).edit


@pytest.mark.parametrize(
    ("is_part", "is_advised"), [(False, False), (True, True)], ids=["all the data", "a part of it"]
)
def test_all_the_data_in_one_batch_cannot_grow(is_part: bool, is_advised: bool) -> None:
    run = small_batch()
    line = run.line("model.py", 10)
    if is_part:
        run.call(run.operator("aten.slice", line, inputs=[(512, 16)], output=(64, 16), op_s=1e-6), -1)
    layer = run.operator("aten.addmm", line, inputs=[(8,), (64, 16), (16, 8)], output=(64, 8), op_s=1e-6)
    run.call(layer, -1, -1, -1)
    run.tried(batched(4), kept=0.3)
    run.tried(batched(8), kept=0.2)
    assert bool(list(RULE.check(run.build()))) == is_advised
