from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.input.hand_made_batch import RULE
from flatout.check.rules.overhead import python_line
from flatout.core.records.trial import TimeModel
from flatout.core.records.workload import LibraryFrame


def making(*, at: int = 41, op_s: float = 0.0, seconds: float = 0.02, device_s: float | None = None) -> EvidenceBuilder:
    """A loop over steps from line 40 of train.py, with the model on line 42; line `at` calls a function of three hot lines."""
    run = EvidenceBuilder(other=3 * seconds, device_s=device_s)
    entry = run.line("train.py", at, "x, y = next_batch(rows)", function="main", loops=(40,))
    model = run.line("train.py", 42, "loss = criterion(model(x), y)", function="main", loops=(40,))
    back = run.line("train.py", 44, "loss.backward()", function="main", loops=(40,))
    run.backward_at(back)
    run.model(model)
    for number in (10, 11, 12):
        line = run.line("batches.py", number, f"work({number})", function="next_batch", loops=(9,), callers=(entry,))
        run.sampled(line, seconds * (1.1 if number == 11 else 1.0), phase="other", num_samples=20)
        if op_s:
            run.operator("aten.stack", line, op_s=op_s, phase="other")
    return run


def test_a_function_that_makes_batches_is_one_finding_at_its_hottest_line() -> None:
    finding = only_finding(RULE, making(seconds=0.02).build())
    assert finding.where is not None
    assert (finding.where.line, len(finding.also)) == (11, 2)
    assert finding.cost_s == pytest.approx(0.06)


def test_it_takes_the_place_of_findings_for_single_lines() -> None:
    assert [f.rule for f in diagnose(making().build(), [RULE, python_line.RULE]).findings] == [RULE.id]


def test_what_comes_after_the_model_is_no_batch() -> None:
    assert not list(RULE.check(making(at=47).build()))


def test_tensor_operators_are_left_to_other_rules() -> None:
    assert not list(RULE.check(making(op_s=0.018).build()))


def test_picking_a_batch_in_little_time_is_left_alone() -> None:
    assert not list(RULE.check(making(seconds=0.002).build()))


def test_host_time_beside_a_busy_device_is_left_alone() -> None:
    assert not list(RULE.check(making(device_s=0.098).build()))


@pytest.mark.parametrize(("elsewhere_s", "is_told"), [(0.01, False), (0.03, True)])
def test_one_line_that_converts_python_numbers_is_left_to_its_own_rule(elsewhere_s: float, is_told: bool) -> None:
    run = making(seconds=elsewhere_s / 3)
    line = run.line("train.py", 41, "x = torch.tensor(rows)", function="main", loops=(40,))
    run.sampled(line, 0.04, phase="other", num_samples=20)
    run.use("torch.tensor", line, 0.04, detail="list")
    assert bool(list(RULE.check(run.build()))) is is_told


STEADY = TimeModel(model=0, variant="steady", backward=True)


def test_what_the_pauses_cost_the_model_is_tried() -> None:
    assert proposed(RULE, making().build()) == [STEADY]
    assert not proposed(RULE, making(seconds=0.002).build())
    assert not proposed(RULE, making(device_s=0.098).build())


def test_a_model_that_is_quicker_without_pauses_adds_to_the_gain() -> None:
    run = making()
    alone = only_finding(RULE, run.build())
    phases = run.build().steps.phases
    model_s = phases["forward"] + phases["backward"]
    run.tried(STEADY, kept=1.0, now_s=model_s - 0.01)
    more = only_finding(RULE, run.build())
    assert more.saved_s == pytest.approx((alone.saved_s[0] + 0.006, alone.saved_s[1] + 0.01))


def test_a_model_that_is_no_quicker_without_pauses_adds_nothing() -> None:
    run = making()
    alone = only_finding(RULE, run.build())
    run.tried(STEADY, kept=1.0, now_s=1.0)
    assert only_finding(RULE, run.build()).saved_s == alone.saved_s


def stepping(*, op: str = "", second: str = "") -> EvidenceBuilder:
    """Line 41 steps an environment, and takes as long again in phase "other" under a library's line; line 40 is beside it."""
    run = EvidenceBuilder(other=0.06)
    step = run.line("train.py", 41, "obs, *_ = envs.step(actions)", function="main", loops=(40,))
    below = LibraryFrame(file="gymnasium/vector/sync_vector_env.py", line=9)
    again = run.line("train.py", 41, "obs, *_ = envs.step(actions)", function="main", loops=(40,), via=(below,))
    beside = run.line("train.py", 42, "buffer.add(obs)", function="main", loops=(40,))
    run.model(run.line("train.py", 43, "loss = model(x)", function="main", loops=(40,)))
    run.backward_at(run.line("train.py", 44, "loss.backward()", function="main", loops=(40,)))
    run.sampled(step, 0.02, phase="environment", num_samples=20)
    run.sampled(again, 0.03, phase="other", num_samples=20)
    run.sampled(beside, 0.02, phase="other", num_samples=20)
    for source, name in ((again, op), (beside, second)):
        if name:
            run.operator(name, source, op_s=0.0001, phase="other")
    return run


def test_the_line_that_steps_an_environment_makes_no_batch() -> None:
    assert not list(RULE.check(stepping(op="aten.stack").build()))


def test_what_makes_tensors_beside_an_environment_is_judged_by_line() -> None:
    run = stepping(second="aten.stack")
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (42, pytest.approx(0.06 * 2 / 5))


def test_a_line_without_tensors_in_a_function_that_makes_some_is_left_alone() -> None:
    run = stepping()
    run.operator("aten.stack", run.line("train.py", 39, function="main", loops=(40,)), op_s=0.0001, phase="other")
    assert not list(RULE.check(run.build()))


def test_python_in_the_models_forward_is_no_batch() -> None:
    run = EvidenceBuilder(other=0.06)
    run.model(run.line("train.py", 42, "loss = criterion(model(x), y)", function="main", loops=(40,)))
    inside = run.line("model.py", 27, "for conv in self.convs:", function="Net.forward", loops=(27,), callers=(0,))
    run.operator("aten.convolution", inside, phase="forward", module="Net.convs.0")
    run.backward_at(run.line("train.py", 44, "loss.backward()", function="main", loops=(40,)))
    run.sampled(inside, 0.06, phase="other", num_samples=20)
    assert not list(RULE.check(run.build()))


def test_the_line_that_calls_the_model_is_not_where_the_batch_is_made() -> None:
    run = making(seconds=0.005)
    call = run.line("train.py", 42, "loss = criterion(model(x), y)", function="main", loops=(40,))
    run.sampled(call, 0.012, phase="other", num_samples=20)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 11
    assert finding.cost_s == pytest.approx(0.015)


def test_samples_that_came_late_do_not_shorten_the_batch() -> None:
    """A sampler that waits for a call in C files its sample under the line that comes next, between the phases."""
    run = making(seconds=0.02)
    run.sampled(run.backward_sources[0], 0.02, phase="other", num_samples=20)
    run.steps = msgspec.structs.replace(run.steps, phases=run.steps.phases | {"other": 0.08})
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.08)


def test_what_else_runs_between_the_phases_is_no_batch() -> None:
    run = making(seconds=0.02)
    run.sampled(
        run.line("train.py", 46, "log(loss)", function="main", loops=(40,)), 0.02, phase="other", num_samples=20
    )
    run.steps = msgspec.structs.replace(run.steps, phases=run.steps.phases | {"other": 0.08})
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.062)


def test_what_the_model_takes_longer_after_the_pause_is_part_of_what_is_gained() -> None:
    """The laws trim a saving to its cost: the pause belongs to both."""
    run = making(seconds=0.01)
    model_s = sum(run.steps.phases[name] for name in ("forward", "backward"))
    run.tried(STEADY, kept=1.0, now_s=model_s - 0.02)
    evidence = run.build()
    [finding] = diagnose(evidence, [RULE]).findings
    whole_s = evidence.steps.whole_s
    assert finding.gain[1] == pytest.approx(whole_s / (whole_s - 0.98 * 0.03 - 0.02), rel=0.01)
    assert "after such a pause the model takes 20.00 ms longer" in finding.because
