from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evidence_builder import EvidenceBuilder

from flatout.core.records.trial import TimeOptimizer, TrialResult
from flatout.machine.cost import accounting

TRIAL = TimeOptimizer(optimizer=0)


def test_groups_come_in_the_order_of_their_first_member() -> None:
    assert accounting.group_by([3, 1, 4, 1, 5], lambda n: n % 2) == {1: [3, 1, 1, 5], 0: [4]}
    assert list(accounting.group_by([3, 1, 4], lambda n: n % 2)) == [1, 0]


def test_the_rows_of_a_line_are_those_of_both_passes() -> None:
    run = EvidenceBuilder()
    one, other = run.line("model.py", 1), run.line("model.py", 2)
    forward = run.operator("aten.mm", one, op_s=0.01, python_s=0.002)
    run.operator("aten.mm", other, op_s=0.1)
    backward = run.operator("aten.mm", one, op_s=0.02, phase="backward")
    evidence = run.build()

    rows = accounting.rows_at(evidence, (one,))

    assert rows == (forward, backward)
    assert accounting.operator_seconds(evidence, rows) == pytest.approx(0.032)
    assert accounting.has_backward(evidence, rows)
    assert not accounting.has_backward(evidence, (forward,))
    assert accounting.rows_at(evidence, ()) == ()


def test_the_seconds_of_host_and_device_are_not_added_on_a_device() -> None:
    seconds = {}
    for bound, device_s in (("device", 0.1), ("host", 0.02)):
        run = EvidenceBuilder(step_s=0.1, device_s=device_s)
        run.operator("aten.mm", op_s=0.03, python_s=0.01)
        seconds[bound] = accounting.operator_seconds(run.build(), (0,))
    assert seconds == {"device": pytest.approx(0.03), "host": pytest.approx(0.01)}


def test_a_result_is_found_by_its_trial() -> None:
    run = EvidenceBuilder()
    run.tried(TimeOptimizer(optimizer=1), kept=0.9)
    run.tried(TRIAL, kept=0.5)
    result = accounting.result_of(run.build(), TRIAL)
    assert result is not None
    assert accounting.remaining_fraction(result) == pytest.approx(0.5)


def test_a_refused_trial_has_no_result() -> None:
    run = EvidenceBuilder()
    run.refused(TRIAL, why="no memory")
    assert accounting.result_of(run.build(), TRIAL) is None
    assert accounting.result_of(EvidenceBuilder().build(), TRIAL) is None


@pytest.mark.parametrize(("now_s", "cured_s"), [(None, None), (0.0, 0.1), (0.1, None)])
def test_a_result_without_times_keeps_all_of_the_time(now_s: float | None, cured_s: float | None) -> None:
    assert accounting.remaining_fraction(TrialResult(trial=TRIAL, now_s=now_s, cured_s=cured_s)) == 1.0


@given(st.floats(-1, 1), st.floats(0, 1))
def test_a_range_is_ordered_and_never_negative(seconds: float, spread: float) -> None:
    low, high = accounting.around(seconds, spread)
    assert 0 <= low <= high
    if seconds >= 0:
        assert low <= seconds <= high


def test_the_model_takes_the_forward_and_the_backward() -> None:
    run = EvidenceBuilder(data=0.5, forward=0.02, backward=0.03, optimizer=0.5)
    assert accounting.model_seconds(run.build()) == pytest.approx(0.05)


def test_loops_come_innermost_first_and_through_the_callers() -> None:
    run = EvidenceBuilder()
    outer = run.line("train.py", 24, loops=(20, 22))
    inner = run.line("model.py", 12, loops=(10,), callers=(outer,))
    places = list(accounting.loops_around(run.build(), inner))
    assert [(file.rpartition("/")[2], line) for file, line in places] == [
        ("model.py", 10),
        ("train.py", 22),
        ("train.py", 20),
    ]
    assert list(accounting.loops_around(run.build(), -1)) == []


def test_the_loops_of_training_are_those_around_the_backward_and_the_optimizer() -> None:
    run = EvidenceBuilder()
    run.backward_at(run.line("train.py", 26, loops=(20, 23)))
    run.optimizer(run.line("engine.py", 7, loops=(5,), callers=(run.line("train.py", 28, loops=(20,)),)))
    run.line("model.py", 12, loops=(10,))
    loops = {(file.rpartition("/")[2], line) for file, line in accounting.step_loops(run.build())}
    assert loops == {("train.py", 20), ("train.py", 23), ("engine.py", 5)}


@pytest.mark.parametrize(("kind", "expected"), [("inference", {8}), ("training", set())])
def test_the_loop_around_the_model_is_the_steps_own_in_inference_alone(kind: str, expected: set[int]) -> None:
    run = EvidenceBuilder(kind=kind)
    run.model(run.line("serve.py", 9, loops=(8,)))
    assert {line for _, line in accounting.step_loops(run.build())} == expected


def test_the_usual_number_of_calls_is_the_commonest_whatever_the_shapes() -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 12)
    for op in ("aten.mm", "aten.tanh"):
        run.operator(op, line, output=(8, 64), calls=20)
        run.operator(op, line, output=(4, 64), calls=10)  # a last, smaller batch
    run.operator("aten.zeros", line, calls=1)
    assert accounting.usual_calls(run.build().operators) == 30
    assert accounting.usual_calls([]) == 0


def test_calls_in_different_modules_are_not_added() -> None:
    run = EvidenceBuilder()
    for layer in range(24):
        run.operator("aten.relu", run.line("model.py", 12), module=f"Net.layers.{layer}")
    assert accounting.usual_calls(run.build().operators) == 1
