"""The parts of a step: disjoint, named, and together no more than the step."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evidence_builder import MACHINE, EvidenceBuilder

from flatout.check.breakdown import Breakdown, break_down
from flatout.core.records.device import DeviceKernel, DeviceStep, Gap
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import PartOfStep
from flatout.core.records.workload import Source
from flatout.machine.cost.families import OTHER_FAMILY, family_of

STEP_S: Final = 0.1
change = msgspec.structs.replace


def parts_of(evidence: Evidence, *, explained_s: float = 0.0) -> Breakdown:
    """The breakdown with no floors, after a look at the law that every one obeys."""
    found = break_down(evidence, [None] * len(evidence.operators), explained_s=explained_s)
    whole_s = evidence.steps.whole_s
    assert all(p.seconds > 0 for p in found.parts)
    assert found.unexplained_s >= 0
    assert sum(p.seconds for p in found.parts) + found.unexplained_s == pytest.approx(whole_s, rel=1e-6)
    for part in found.parts:
        assert part.floor_s is None or part.floor_s <= part.seconds * (1 + 1e-9)
        assert sum(line.seconds for line in part.lines) <= part.seconds * (1 + 1e-6), part
        assert part.basis
    return found


def part(found: Breakdown, name: str) -> PartOfStep:
    return next(p for p in found.parts if p.name == name)


def named(found: Breakdown) -> set[str]:
    return {p.name for p in found.parts}


def deep(evidence: Evidence, *, agreement: float = 1.2, nearby_s: float = STEP_S) -> Evidence:
    """The evidence with recorded steps that add up to so much of an undisturbed one."""
    return change(evidence, observing=change(evidence.observing, deep_agreement=agreement, nearby_step_s=nearby_s))


# ---------------------------------------------------------------------------------------------------------- on a CPU


def test_kernels_are_told_by_family_with_their_share_of_the_floor() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    run.operator("aten.addmm", run.line("model.py", 3), op_s=0.02)
    run.operator("aten.bmm", run.line("model.py", 5), op_s=0.01)
    run.operator("aten.relu", run.line("model.py", 3), op_s=0.002)
    found = break_down(run.build(), [0.01, 0.005, None])

    products = part(found, "matrix products")
    assert products.seconds == pytest.approx(0.03, rel=0.01)
    assert products.floor_fraction == pytest.approx(0.5, rel=0.01)
    assert [line.source.line for line in products.lines] == [3, 5]
    assert part(found, "pointwise operators").floor_s is None


def test_the_operators_of_a_phase_take_no_longer_than_the_phase() -> None:
    run = EvidenceBuilder(step_s=STEP_S, forward=0.04, other=0.0)
    run.operator("aten.mm", op_s=0.06)
    run.operator("aten.mm", op_s=0.09, phase="backward")

    assert part(parts_of(run.build()), "matrix products").seconds == pytest.approx(0.04 + 0.05, rel=0.01)


def test_the_call_of_an_operator_is_no_kernel() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    run.operator("aten.add", run.line("model.py", 3), calls=1000, op_s=0.01)
    found = parts_of(run.build())

    calls_s = 1000 * MACHINE.dispatch_s
    assert part(found, "dispatch").seconds == pytest.approx(calls_s)
    assert part(found, "pointwise operators").seconds == pytest.approx(0.01 - calls_s)


def test_a_view_takes_no_longer_than_a_call_can() -> None:
    run = EvidenceBuilder(step_s=STEP_S, data=0.0)
    view = run.operator("aten.view", calls=10, op_s=0.02)
    run.operators[view] = change(run.operators[view], bytes=0)
    found = parts_of(run.build())

    assert part(found, "dispatch").seconds < 0.001
    assert found.unexplained_s > 0.099


def test_page_faults_are_taken_out_of_the_kernels_that_write_new_memory() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    run.operator("aten.add", op_s=0.01, output=(1000, 1000))
    run.operator("aten.add_", op_s=0.01, output=(1000, 1000))
    run.pages(-1, faults=5000, kernel_s=0.004)
    found = parts_of(run.build())

    assert part(found, "page faults of new memory").seconds == pytest.approx(0.004)
    assert part(found, "pointwise operators").seconds == pytest.approx(0.016, rel=0.01)


def test_samples_less_the_operators_of_a_line_are_its_python() -> None:
    run = EvidenceBuilder(step_s=STEP_S, forward=0.04, other=0.0)
    slow, model = run.line("train.py", 9, "encode(row)"), run.line("model.py", 3)
    run.operator("aten.mm", model, op_s=0.01)
    run.sampled(slow, 0.03, phase="forward", num_samples=60)
    run.sampled(model, 0.01, phase="forward", num_samples=20)
    run.sampled(run.line("train.py", 20), 0.06, phase="backward", num_samples=60)
    found = parts_of(run.build())

    python = part(found, "Python at train.py:9")
    assert python.seconds == pytest.approx(0.03, rel=0.05)
    assert python.lines[0].source.text == "encode(row)"
    assert "Python at model.py:3" not in named(found)


def test_an_installed_package_is_told_by_its_name() -> None:
    run = EvidenceBuilder(step_s=STEP_S, forward=0.04, other=0.0)
    line = run.line("ppo.py", 40, "obs, reward, done, _, info = envs.step(action)")
    run.sources[line] = change(run.sources[line], library="gymnasium/envs/classic_control/cartpole.py:180")
    run.sampled(line, 0.04, phase="forward", num_samples=50)

    package = part(parts_of(run.build()), "gymnasium")
    assert package.seconds == pytest.approx(0.04, rel=0.05)
    assert (package.kind, package.lines[0].source.line) == ("package", 40)


def test_a_line_with_few_samples_is_not_named_by_itself() -> None:
    run = EvidenceBuilder(step_s=STEP_S, forward=0.04, other=0.0)
    for line in range(5):
        run.sampled(run.line("train.py", line + 1), 0.008, phase="forward", num_samples=2)

    found = parts_of(run.build())
    assert part(found, "Python on other lines").seconds == pytest.approx(0.04)


def test_between_the_operators_of_a_backward_runs_autograds_engine_but_not_for_ever() -> None:
    def engine_s(calls: float) -> tuple[float, float]:
        run = EvidenceBuilder(step_s=STEP_S, backward=0.05)
        run.backward_at(run.line("train.py", 20, "loss.backward()"))
        run.operator("aten.mm", calls=calls, op_s=0.01, phase="backward")
        found = parts_of(run.build())
        return part(found, "autograd engine").seconds, found.unexplained_s

    assert engine_s(100_000)[0] == pytest.approx(0.04)
    few_s, open_s = engine_s(10)
    assert few_s < 0.001
    assert open_s > 0.039


def test_waiting_for_data_and_evaluation_are_parts_as_they_are() -> None:
    run = EvidenceBuilder(step_s=STEP_S, evaluation=0.02, evaluation_s=0.02, data=0.03)
    fetch = run.line("train.py", 12, "for batch in loader:")
    run.sampled(fetch, 0.03, phase="data", num_samples=30)
    found = parts_of(run.build())

    assert part(found, "evaluation").seconds == pytest.approx(0.02 * 0.12 / 0.148)
    assert part(found, "waiting for data").lines[0].source.line == 12


def test_phases_that_add_up_to_more_than_the_step_are_brought_down_to_it() -> None:
    run = EvidenceBuilder(step_s=STEP_S, data=0.1, evaluation=0.1)
    steps = run.build().steps

    assert sum(steps.phases_of_whole.values()) == pytest.approx(steps.whole_s)
    parts_of(run.build())


def test_an_optimizers_line_is_in_its_phase_whatever_a_sample_guessed() -> None:
    run = EvidenceBuilder(step_s=STEP_S, forward=0.018, optimizer=0.03, other=0.0)
    step = run.line("train.py", 30, "optimizer.step()")
    run.optimizer(step)
    run.sampled(step, 0.03, phase="evaluation", num_samples=30)
    found = parts_of(run.build())

    assert part(found, "Python at train.py:30").seconds == pytest.approx(0.03)


def test_what_the_recorded_steps_did_not_last_is_unexplained() -> None:
    run = EvidenceBuilder(step_s=STEP_S, data=0.0)
    run.operator("aten.mm", op_s=0.04)
    run.sampled(run.line("model.py", 3), 0.09, phase="forward", num_samples=90)

    found = parts_of(deep(run.build(), agreement=0.1))
    assert found.unexplained_s >= 0.85 * STEP_S
    assert part(found, "matrix products").seconds == pytest.approx(0.04 * 0.1 / 0.75, rel=0.01)


def test_a_step_that_has_grown_since_it_was_recorded_has_grown_in_its_operators() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    run.operator("aten.mm", op_s=0.01)

    found = parts_of(deep(run.build(), nearby_s=STEP_S / 2))
    assert part(found, "matrix products").seconds == pytest.approx(0.02, rel=0.01)


def test_what_findings_account_for_is_not_unexplained() -> None:
    evidence = EvidenceBuilder(step_s=STEP_S, data=0.0).build()

    found = parts_of(evidence, explained_s=0.07)
    assert found.unexplained_s == pytest.approx(0.03)
    assert [p.kind for p in found.parts] == ["cause"]


def test_without_steps_there_are_no_parts() -> None:
    assert parts_of(EvidenceBuilder(step_s=0.0, noise_s=0.0, data=0.0).build()) == Breakdown((), 0.0)


def test_communication_that_nothing_hides_is_no_engine() -> None:
    run = EvidenceBuilder(step_s=STEP_S, backward=0.05)
    run.operator("aten.mm", calls=100_000, op_s=0.01, phase="backward")
    run.collective(run.line("train.py", 20), phase="backward", exposed_s=0.02)

    found = parts_of(run.build())
    [communication] = [p for p in found.parts if p.kind == "communication"]
    assert communication.seconds == pytest.approx(0.02)
    assert part(found, "autograd engine").seconds == pytest.approx(0.02)


# ------------------------------------------------------------------------------------------------------- on a device


def on_device(*gaps: Gap, busy_s: float = 0.06, kernels: tuple[DeviceKernel, ...] = ()) -> EvidenceBuilder:
    run = EvidenceBuilder(step_s=STEP_S, device_s=busy_s)
    step = DeviceStep(name="cuda:0", span_s=STEP_S, busy_s=busy_s, gaps=gaps, kernels=kernels)
    run.device_step = step
    return run


def test_a_devices_busy_time_goes_to_kernels_and_its_idle_time_to_what_it_waited_for() -> None:
    run = on_device(
        Gap(source=0, num=10, seconds=0.025, cause="late-launch"),
        Gap(source=0, num=1, seconds=0.01, cause="data"),
        Gap(source=0, num=1, seconds=0.005, cause="unknown"),
    )
    line = run.line("model.py", 3)
    run.operator("aten.mm", line, op_s=0.05, python_s=0.01)
    found = parts_of(change(run.build(), device_step=run.device_step))

    assert part(found, "matrix products").seconds == pytest.approx(0.05)
    assert part(found, "waiting for data").seconds == pytest.approx(0.01)
    assert part(found, "device idle, launches").seconds == pytest.approx(MACHINE.dispatch_s)
    idle = part(found, "device idle, Python between launches")
    assert (idle.seconds, idle.lines[0].source.line) == (pytest.approx(0.025 - MACHINE.dispatch_s), 3)
    assert found.unexplained_s == pytest.approx(0.015), "busy without an operator, and a gap of unknown cause"


def test_a_kernel_that_no_operator_launched_is_told_by_its_own_name() -> None:
    mine = DeviceKernel(name="my_scan", source=-1, phase="forward", num_launches=1, seconds=0.02)
    run = on_device(kernels=(mine,))
    run.operator("aten.mm", op_s=0.04)
    found = parts_of(change(run.build(), device_step=run.device_step))

    assert part(found, "kernel my_scan").seconds == pytest.approx(0.02)


def compiled(*rows: tuple[str, float, int]) -> Evidence:
    """One compiled graph that keeps the device busy for 60 ms, and what it launched: names, seconds, bytes."""
    mine = DeviceKernel(name="triton_poi_fused_0", source=-1, phase="forward", num_launches=1, seconds=0.02)
    run = on_device(kernels=(mine,))
    run.operator("inductor.graph", run.line("model.py", 3), op_s=0.06)
    inside = EvidenceBuilder(step_s=STEP_S, device_s=0.06)
    for op, seconds, _ in rows:
        inside.operator(op, op_s=seconds)
    operators = (change(o, bytes=b, flop=0) for o, (_, _, b) in zip(inside.build().operators, rows, strict=True))
    return change(run.build(), device_step=run.device_step, kernel_operators=tuple(operators))


def test_a_compiled_graph_is_divided_into_what_it_launched() -> None:
    evidence = compiled(
        ("aten.mm", 0.04, 100), ("inductor.triton_poi_fused_0", 0.015, 100), ("kernel.my_scan<4>", 0.005, 0)
    )
    found = break_down(evidence, [0.03, 0.006, 0.0])

    products, fused = part(found, "matrix products"), part(found, "compiled kernels")
    assert (products.seconds, products.floor_s) == (pytest.approx(0.04), pytest.approx(0.03))
    assert (fused.seconds, fused.floor_s) == (pytest.approx(0.015), pytest.approx(0.006))
    assert part(found, "kernel my_scan<4>").floor_s is None
    assert "compiled graphs" not in named(found) and "kernel triton_poi_fused_0" not in named(found)


def test_a_compiled_kernel_whose_bytes_are_not_known_counts_with_its_own_time() -> None:
    evidence = compiled(("inductor.triton_poi_fused_0", 0.04, 100), ("inductor.triton_poi_fused_embedding_1", 0.02, 0))
    fused = part(break_down(evidence, [0.03, 0.0]), "compiled kernels")
    assert (fused.seconds, fused.floor_s) == (pytest.approx(0.06), pytest.approx(0.03 + 0.02))


# ----------------------------------------------------------------------------------------------------- any evidence

SECONDS = st.floats(0, 2 * STEP_S, allow_nan=False)
PHASES = st.sampled_from(["data", "forward", "backward", "optimizer", "evaluation", "other"])
OPS = st.sampled_from(["aten.mm", "aten.view", "aten.add_", "mine.thing", "aten._foreach_add_"])


@given(
    st.lists(st.tuples(OPS, PHASES, SECONDS, st.floats(0, 1e5), st.integers(-1, 2)), max_size=6),
    st.lists(st.tuples(PHASES, SECONDS, st.integers(0, 40), st.integers(0, 2)), max_size=6),
    st.dictionaries(PHASES, SECONDS, max_size=6),
    st.floats(0.01, 20),
    st.floats(0, 2 * STEP_S),
    st.sampled_from([None, 0.0, 0.05, 0.3]),
)
def test_whatever_was_observed_the_parts_make_up_the_step(
    operators: list[tuple[str, str, float, float, int]],
    samples: list[tuple[str, float, int, int]],
    phases: dict[str, float],
    agreement: float,
    explained_s: float,
    device_s: float | None,
) -> None:
    run = EvidenceBuilder(step_s=STEP_S, device_s=device_s, **phases)
    for line in range(3):
        run.line("train.py", line + 1)
    run.backward_at(1)
    for op, phase, op_s, calls, source in operators:
        run.operator(op, source, calls=calls, op_s=op_s, phase=phase)  # type: ignore[arg-type]
    for phase, seconds, num, source in samples:
        run.sampled(source, seconds, phase=phase, num_samples=num)  # type: ignore[arg-type]
    run.pages(-1, faults=1e4, kernel_s=0.05)
    evidence = deep(run.build(), agreement=agreement)

    parts_of(evidence, explained_s=min(explained_s, evidence.steps.whole_s))


# -------------------------------------------------------------------------------------------------------- families


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("aten.mm", "matrix products"),
        ("aten.addmm", "matrix products"),
        ("aten._scaled_mm", "matrix products"),
        ("aten.convolution_backward", "convolutions"),
        ("aten.mkldnn_rnn_layer", "recurrent layers"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten.native_batch_norm", "normalisation"),
        ("aten.linalg_vector_norm", "reductions"),
        ("aten.max_pool2d_with_indices", "pooling and resampling"),
        ("aten.max", "reductions"),
        ("aten.maximum", "pointwise operators"),
        ("aten.nll_loss_backward", "softmax and losses"),
        ("aten.embedding_dense_backward", "gathers and scatters"),
        ("aten.index_put_", "gathers and scatters"),
        ("aten.native_dropout", "random numbers"),
        ("aten.bernoulli_", "random numbers"),
        ("aten._to_copy", "copies and casts"),
        ("aten.zeros_like", "copies and casts"),
        ("aten.topk", "sorting"),
        ("aten._foreach_addcdiv_", "optimizer's multi-tensor kernels"),
        ("aten._fused_adamw_", "optimizer's multi-tensor kernels"),
        ("aten._cholesky_solve_helper", "decompositions and solvers"),
        ("c10d.allreduce_", "collectives"),
        ("inductor.graph", "compiled graphs"),
        ("mine.thing", OTHER_FAMILY),
    ],
)
def test_an_operator_belongs_to_a_family_of_kernels(op: str, family: str) -> None:
    assert family_of(op) == family


def test_a_source_without_a_file_names_no_line() -> None:
    run = EvidenceBuilder(step_s=STEP_S)
    run.sources.append(Source(file="", line=0))
    run.sampled(0, 0.02, phase="forward", num_samples=9)
    parts_of(run.build())
