from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.metrics_one_by_one import RULE


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


def test_a_loop_over_the_parameters_is_left_to_its_own_rule() -> None:
    """Norms of all gradients, read one by one: nothing of a batch's samples."""
    run = EvidenceBuilder()
    step = run.line("train.py", 23, "optimizer.step()", loops=(10,))
    run.optimizer(step)
    run.fact("parameter-shapes", step, value=40, text="64x64,64")
    line = run.line("train.py", 21, "norms = {n: p.grad.norm().item() for n, p in named}", loops=(10, 21))
    for shape in ((64, 64), (64,)):
        run.operator(
            "aten.linalg_vector_norm",
            line,
            inputs=[shape],
            output=(),
            calls=20,
            op_s=0.01,
            python_s=0.01,
            phase="other",
        )
    run.host_read(line, call="item", calls=40)
    assert not list(RULE.check(run.build()))


def returns(*, is_recurrence: bool) -> EvidenceBuilder:
    """Line 21 computes a value from the one before, or from its own inputs alone, and reads it."""
    run = EvidenceBuilder()
    run.backward_at(run.line("train.py", 30, "loss.backward()", loops=(10,)))
    line = run.line("train.py", 21, "q = rho[i] * (q - a[i]) + v[i]; out.append(q.item())", loops=(10, 20))
    names = ("aten.sub", "aten.mul", "aten.add", "aten._local_scalar_dense")
    sub, mul, add, read = (
        run.operator(name, line, inputs=[(1,)], output=(1,), calls=30, op_s=0.005, phase="other") for name in names
    )
    value = -1
    for _ in range(30):
        new = run.call(add, run.call(mul, -1, run.call(sub, value, -1)), -1)
        run.call(read, new)
        value = new if is_recurrence else -1
    run.host_read(line, call="item", calls=30)
    return run


def test_values_that_need_one_another_are_computed_on_numbers() -> None:
    chained, apart = (only_finding(RULE, returns(is_recurrence=r).build()) for r in (True, False))
    assert "tolist" in chained.edit
    assert "whole batch" not in chained.edit
    assert "whole batch" in apart.edit
    assert chained.cost_s == apart.cost_s


def test_a_rollout_is_left_alone() -> None:
    """Actions are read one by one, because the environment answers each before the next."""
    run = counting()
    run.sampled(run.line("train.py", 22, "state = env.step(action)", loops=(10, 20)), 0.01, phase="environment")
    assert not list(RULE.check(run.build()))
