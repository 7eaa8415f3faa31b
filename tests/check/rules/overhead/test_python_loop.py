from __future__ import annotations

import pytest
from tests.evidence_builder import MACHINE, EvidenceBuilder, only_finding, proposed, tensor

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


# ---------------------------------------------------------------------------- iterations that depend on one another outside torch


def acting(*, environment: bool, values: str = "") -> EvidenceBuilder:
    """A rollout: in each iteration a tensor of 4 is made of Python's numbers, and the policy reads that, or another."""
    run = training()
    loop = run.line("train.py", 15, "action = select_action(state)", loops=(14,))
    line = run.line("train.py", 5, "probs = policy(state)", callers=(loop,))
    making = run.line("train.py", 4, "state = torch.tensor(state)", callers=(loop,))
    make = run.operator("aten.lift_fresh", making, inputs=[(4,)], output=(4,), calls=TIMES, op_s=TIMES * 1e-6)
    read_from = [(1, 4)] if values != "beside" else [(16, 64)]
    softmax = run.operator("aten._softmax", line, **SHARE | {"inputs": read_from})
    reading = run.line("train.py", 6, "return probs.argmax().item()", callers=(loop,))
    read = run.operator("aten._local_scalar_dense", reading, inputs=[(16, 64)], calls=TIMES, op_s=TIMES * 1e-6)
    for _ in range(TIMES):
        run.call(make, -1)
        probs = run.call(softmax, -1)
        if values:
            run.call(read, probs)
    if environment:
        step = run.line("train.py", 16, "state, reward, *_ = env.step(action)", loops=(14,))
        run.sampled(step, 0.01, phase="environment", num_samples=2)
    return run


def test_a_loop_that_steps_an_environment_is_left_alone() -> None:
    assert list(RULE.check(acting(environment=False).build())), "without the environment the iterations are independent"
    assert not list(RULE.check(acting(environment=True).build()))


def test_a_loop_beside_an_environment_is_judged() -> None:
    run = rows_one_by_one()
    run.sampled(run.line("train.py", 22, "state = env.step(action)", loops=(20,)), 0.01, phase="environment")
    assert list(RULE.check(run.build()))


def test_values_that_come_back_from_python_make_a_loop_sequential() -> None:
    assert not list(RULE.check(acting(environment=False, values="fed back").build()))


def test_tensors_made_beside_the_values_read_do_not_make_a_loop_sequential() -> None:
    assert list(RULE.check(acting(environment=False, values="beside").build()))


def test_a_recurrent_cell_in_a_rollout_is_still_tried() -> None:
    run = state_by_state(has_cell=True)
    run.tried(*proposed(RULE, run.build()), kept=0.25)
    run.sampled(run.line("model.py", 15, "state = env.step(a)", loops=(10,)), 0.01, phase="environment")
    assert only_finding(RULE, run.build()).basis == "trial"


# ------------------------------------------------------------------------------------------------- parts, shapes, shared tensors


def test_rows_added_into_their_own_parts_of_a_buffer_are_independent() -> None:
    run = training()
    line = run.line("model.py", 12, "target[i].index_add_(0, at[i], values[i])", loops=(10,))
    buffer = run.call(run.operator("aten.zeros", run.line("model.py", 9), output=(TIMES, 64)))
    add = run.operator("aten.index_add_", line, **SHARE | {"inputs": [(64,), (64,), (64,)], "output": (64,)})
    for i in range(TIMES):
        row = run.operator("aten.select", line, inputs=[(TIMES, 64)], output=(64,), op_s=1e-6, scalars=f"0, {i}")
        run.call(row, buffer)
        buffer = run.call(add, buffer, -1, -1)
    assert "do not feed one another" in only_finding(RULE, run.build()).because


def per_parameter(shapes: list[tuple[int, ...]], *, mask: bool = False) -> EvidenceBuilder:
    """A loop that picks rows and scales them, of these shapes one after another."""
    run = training()
    line = run.line("optimizer.py", 12, "grad = clip * p.grad_sample[picked]", loops=(10,))
    rows = {}
    for shape in dict.fromkeys(shapes):
        num = shapes.count(shape)
        rows[shape] = run.operator("aten.mul", line, inputs=[shape], calls=num, op_s=num * 1e-4, python_s=num * 5e-5)
    picked = tensor(TIMES, dtype="bool") if mask else tensor(TIMES, dtype="int64")
    pick = run.operator("aten.index", line, inputs=[(TIMES, 64), picked], calls=len(shapes))
    for shape in shapes:
        run.call(pick, -1, -1)
        run.call(rows[shape], -1)
    return run


MIXED = [(64, 64), (64,)] * 10 + [(32, 64), (32,)] * 10


def test_operators_of_other_shapes_in_each_iteration_are_left_alone() -> None:
    assert not list(RULE.check(per_parameter(MIXED).build()))


def test_a_shorter_last_piece_is_no_other_shape() -> None:
    assert list(RULE.check(per_parameter([(64, 64)] * 39 + [(20, 64)]).build()))


def test_rows_picked_by_a_mask_can_be_summed_at_once() -> None:
    assert list(RULE.check(per_parameter([(n, 64) for n in range(1, 41)], mask=True).build()))


def pooled(*, shared: bool) -> EvidenceBuilder:
    """Rows of 1 MB picked by a mask in each iteration, and the gradients of the whole, filled with zeros and added up.

    The masks pick from one tensor, or each from its own.
    """
    run = training()
    line = run.line("model.py", 12, "pooled.append(atoms[owner == g].mean(dim=0))", loops=(10,))
    whole = (4096, 64)
    make = run.operator("aten.relu", run.line("model.py", 9), output=whole)
    share = {"calls": TIMES, "op_s": TIMES * 1e-4, "python_s": 0.0}
    pick = run.operator("aten.index", line, inputs=[whole, tensor(4096, dtype="bool")], output=(16, 64), **share)
    run.operator("aten.add", line, inputs=[whole, whole], output=whole, phase="backward", **share)
    first = run.call(make)
    for _ in range(TIMES):
        run.call(pick, first if shared else run.call(make), -1)
    return run


def test_the_gradient_of_what_the_iterations_share_is_made_once() -> None:
    finding = only_finding(RULE, pooled(shared=True).build())
    assert finding.saved_s[0] > 0.8 * finding.cost_s


def large_tensors(*, shared: bool) -> EvidenceBuilder:
    """A loop that scales 4 MB in each iteration: of one tensor, or of others."""
    run = training()
    line = run.line("model.py", 12, "out.append(torch.mul(x[i], mask))", loops=(10,))
    make = run.operator("aten.rand", run.line("model.py", 9), output=(1000, 1000))
    mul = run.operator("aten.mul", line, **SHARE | {"inputs": [(1000, 1000)], "output": (1,)})
    first = run.call(make)
    for _ in range(TIMES):
        run.call(mul, first if shared else run.call(make))
    return run


def test_a_large_tensor_is_read_once_only_where_it_is_the_same() -> None:
    assert only_finding(RULE, large_tensors(shared=True).build()).saved_s[1] > 5e-3
    assert not list(RULE.check(large_tensors(shared=False).build())), "in one piece, the same bytes are moved"
