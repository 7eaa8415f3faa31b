from __future__ import annotations

import pytest
from tests.evidence_builder import MACHINE, EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.python_loop import RULE
from flatout.core.records.trial import TimeRecurrence

TIMES = 40
SHARE = {"inputs": [(16, 64)], "output": (16, 64), "calls": TIMES, "op_s": TIMES * 100e-6, "python_s": TIMES * 50e-6}
"""An operator of 100 us that runs 40 times a step, with 50 us of Python before each: 6 ms a step."""


def training(**kwargs: object) -> EvidenceBuilder:
    """A training loop that begins on line 20 of train.py and calls the model on line 24."""
    run = EvidenceBuilder(**kwargs)
    run.backward_at(run.line("train.py", 26, "loss.backward()", loops=(20,)))
    run.optimizer(run.line("train.py", 27, "optimizer.step()", loops=(20,)))
    run.line("train.py", 24, "loss = net(x, y)", loops=(20,))
    return run


def rows_one_by_one(**kwargs: object) -> EvidenceBuilder:
    """A loop over rows that do not feed one another, each written into one buffer, and its backward: 18 ms."""
    run = training(**kwargs)
    line = run.line("model.py", 12, "out[i] = torch.tanh(x[i])", loops=(10,), callers=(run.line("train.py", 24),))
    tanh, copy = run.operator("aten.tanh", line, **SHARE), run.operator("aten.copy_", line, **SHARE)
    run.operator("aten.tanh_backward", line, phase="backward", **SHARE)
    buffer = -1
    for _ in range(TIMES):
        buffer = run.call(copy, buffer, run.call(tanh, -1))
    return run


def state_by_state(
    *, is_through_a_large_operator: bool = False, has_cell: bool = False, device_s: float | None = None
) -> EvidenceBuilder:
    """A loop whose state goes from one iteration to the next: 12 ms at line 12 of model.py."""
    run = training(device_s=device_s)
    caller = run.line("train.py", 24)
    line = run.line("model.py", 12, "h = self.cell(x[:, t], h)", loops=(10,), callers=(caller,))
    mm, tanh = run.operator("aten.mm", line, **SHARE), run.operator("aten.tanh", line, **SHARE)
    large = run.operator(
        "aten.mm", run.line("model.py", 13, loops=(10,)), calls=TIMES, op_s=TIMES * 400e-6, output=(4096, 4096)
    )
    if has_cell:
        run.recurrence(line, kind="GRUCell", calls=TIMES)
    state = -1
    for _ in range(TIMES):
        state = run.call(tanh, run.call(mm, state))
        if is_through_a_large_operator:
            state = run.call(large, state)
    return run


def test_independent_iterations_are_priced_in_one_piece() -> None:
    finding = only_finding(RULE, rows_one_by_one().build())
    assert finding.where is not None
    assert (finding.where.file, finding.where.line) == ("/home/ada/model.py", 12)
    assert finding.cost_s == pytest.approx(0.018)
    assert finding.saved_s[0] > 0.7 * finding.cost_s
    assert finding.operators == (0, 1, 2), "forward and backward"
    assert finding.basis == "estimate"


def test_iterations_that_need_the_one_before_lose_their_overhead_alone() -> None:
    run = state_by_state()
    finding = only_finding(RULE, run.build())
    assert finding.cost_s == pytest.approx(0.012)
    assert finding.saved_s[1] <= 2 * TIMES * 50e-6


def test_the_same_arithmetic_in_one_piece_is_not_faster_than_the_machine() -> None:
    fast, slow = rows_one_by_one(machine=MACHINE), rows_one_by_one(machine=None)
    assert only_finding(RULE, fast.build()).saved_s[1] <= 0.018
    assert only_finding(RULE, slow.build()).saved_s[1] <= 0.018, "without a machine there is an estimate, not a gap"


def test_a_recurrent_cell_is_tried_as_a_layer() -> None:
    run = state_by_state(has_cell=True)
    expected = TimeRecurrence(cell="GRUCell", batch=16, steps=TIMES, input_size=32, hidden_size=64, backward=False)
    assert proposed(RULE, run.build()) == [expected]


def test_the_trial_prices_the_recurrence() -> None:
    run = state_by_state(has_cell=True)
    run.tried(*proposed(RULE, run.build()), kept=0.25)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (12, "trial")
    assert finding.saved_s[0] <= 0.75 * 0.012 <= finding.saved_s[1] + 1e-12
    assert "GRU" in finding.edit


def test_lines_of_one_loop_are_one_finding_at_the_hottest() -> None:
    run = rows_one_by_one()
    run.operator("aten.sin", run.line("model.py", 11, loops=(10,)), **SHARE)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert (finding.where.line, [s.line for s in finding.also]) == (12, [11])


def test_a_function_called_in_a_loop_belongs_to_that_loop() -> None:
    run = training()
    loop = run.line("model.py", 12, "parts.append(score(x[i]))", loops=(10,), callers=(run.line("train.py", 24),))
    inside = run.line("score.py", 5, "return x.sigmoid()", callers=(loop, run.line("train.py", 24)))
    sigmoid = run.operator("aten.sigmoid", inside, **SHARE)
    for _ in range(TIMES):
        run.call(sigmoid, -1)
    assert only_finding(RULE, run.build()).where == run.build().sources[inside]


def test_a_loop_over_layers_is_left_alone() -> None:
    run = training()
    loop = run.line("model.py", 12, "x = layer(x)", loops=(10,), callers=(run.line("train.py", 24),))
    inside = run.line("block.py", 8, "return self.linear(x).relu()", callers=(loop,))
    for i in range(24):
        run.operator("aten.relu", inside, module=f"Net.layers.{i}", op_s=100e-6, python_s=50e-6)
    assert not list(RULE.check(run.build()))


def test_a_loop_over_micro_batches_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.backward_at(run.line("train.py", 26, "(loss / 40).backward()", loops=(20, 23)))
    run.optimizer(run.line("train.py", 28, "optimizer.step()", loops=(20,)))
    call = run.line("train.py", 25, "loss = net(x, y)", loops=(20, 23))
    inside = run.line("model.py", 8, "return self.linear(x).relu()", callers=(call,))
    run.operator("aten.relu", call, **SHARE)
    run.operator("aten.relu", inside, **SHARE)
    assert not list(RULE.check(run.build()))


def test_a_loop_over_batches_of_inference_is_left_alone() -> None:
    run = EvidenceBuilder(kind="inference")
    call = run.line("serve.py", 9, "answers.append(net(x))", loops=(8,))
    run.model(call, is_training=False, graphs_built=0, graphs_used=0)
    run.operator("aten.relu", run.line("model.py", 8, callers=(call,)), **SHARE)
    assert not list(RULE.check(run.build()))


def test_a_loop_of_large_operators_is_left_alone() -> None:
    run = training()
    line = run.line("model.py", 12, "y.append(x[i] @ self.weight)", loops=(10,))
    run.operator("aten.mm", line, inputs=[(4096, 4096)] * 2, output=(4096, 4096), calls=TIMES, op_s=TIMES * 1e-3)
    assert not list(RULE.check(run.build()))


def test_a_few_iterations_are_left_alone() -> None:
    run = training()
    run.operator("aten.tanh", run.line("model.py", 12, loops=(10,)), calls=8, op_s=8 * 100e-6)
    assert not list(RULE.check(run.build()))


def test_operators_outside_any_loop_are_left_alone() -> None:
    run = training()
    run.operator("aten.tanh", run.line("model.py", 12), **SHARE)
    assert not list(RULE.check(run.build()))


def test_a_recurrence_that_the_layer_makes_slower_does_not_stop_the_diagnosis() -> None:
    run = state_by_state(has_cell=True)
    for op in ("aten.sin", "aten.cos", "aten.exp"):
        run.operator(op, run.line("model.py", 14, loops=(10,)), **SHARE)
    run.tried(*proposed(RULE, run.build()), kept=1.2)
    diagnose(run.build(), [RULE])


def test_the_line_of_a_recurrence_is_not_among_the_further_lines() -> None:
    run = state_by_state(has_cell=True)
    hotter = run.line("model.py", 14, loops=(10,))
    for op in ("aten.sin", "aten.cos", "aten.exp"):
        run.operator(op, hotter, **SHARE)
    run.tried(*proposed(RULE, run.build()), kept=0.25)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert (finding.where.line, [s.line for s in finding.also]) == (12, [14])


def test_a_state_that_passes_a_large_operator_still_goes_from_one_iteration_to_the_next() -> None:
    run = state_by_state(is_through_a_large_operator=True)
    assert only_finding(RULE, run.build()).saved_s[1] <= 2 * TIMES * 50e-6


def test_host_time_beside_a_busy_device_is_not_claimed() -> None:
    run = state_by_state(device_s=0.098)
    findings = list(RULE.check(run.build()))
    assert all(f.saved_s[1] <= 0.001 for f in findings)


def test_a_loop_that_the_samples_say_takes_longer_costs_what_they_say() -> None:
    run = rows_one_by_one()
    source = next(o.source for o in run.operators)
    run.sampled(source, 0.02, num_samples=40)  # the operators of its forward add up to 0.012
    finding = only_finding(RULE, run.build())
    assert finding.cost_s == pytest.approx(0.026)


def test_few_samples_are_not_believed() -> None:
    run = rows_one_by_one()
    run.sampled(next(o.source for o in run.operators), 0.02, num_samples=5)
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.018)


@pytest.mark.parametrize(("now_s", "at_most_s"), [(0.014, 0.0105), (0.1, 1.3 * 0.75 * 0.012)])
def test_a_recurrence_saves_what_its_trial_says_within_reason(now_s: float, at_most_s: float) -> None:
    run = state_by_state(has_cell=True)
    run.tried(*proposed(RULE, run.build()), kept=0.25, now_s=now_s)
    assert only_finding(RULE, run.build()).saved_s[1] == pytest.approx(at_most_s)
