from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flatout.core.records.scale import FOLDED, LOOPED, Layout, ModelShape, ScheduleKind, Software
from flatout.machine.cost.schedules import actions_of, schedule_table
from flatout.scale.memory import in_flight, memory_of
from flatout.scale.sizes import active_parameters, num_parameters

MODEL = ModelShape(hidden=2048, layers=24, heads=16, vocab=50304, seq=1024)


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_activations_are_those_of_korthikanti(tensor: int, is_sequence_parallel: bool) -> None:
    """s b h (10 + 24 / t + 5 a s / (h t)), and s b h (34 / t + ...) with sequence parallelism (2022, equations 2 and 4)."""
    layout = Layout(tensor=tensor, micro_batch=2, global_batch=2, is_sequence_parallel=is_sequence_parallel)
    (memory,) = memory_of(MODEL, layout, Software(attention="written"))
    sbh = 1024 * 2 * 2048
    whole = 34 / tensor if is_sequence_parallel else 10 + 24 / tensor
    assert memory.activation_bytes == pytest.approx(24 * sbh * (whole + 5 * 16 * 1024 / (2048 * tensor)))


def test_gpt3_takes_sixteen_bytes_a_parameter_in_mixed_precision() -> None:
    model = ModelShape(hidden=12288, layers=96, heads=96, vocab=50257, seq=2048)
    (memory,) = memory_of(model, Layout(), Software())
    states = memory.weight_bytes + memory.gradient_bytes + memory.state_bytes
    of_layers, of_embedding = num_parameters(model)
    assert states == 16 * (of_layers + of_embedding)
    assert states == pytest.approx(2.8e12, rel=0.01)


def test_all_experts_are_held_and_a_token_meets_its_own() -> None:
    mixture = structs.replace(MODEL, num_experts=8, experts_per_token=2)
    feed = 2 * 2048 * 4 * 2048
    router = 8 * 2048
    assert num_parameters(mixture)[0] - num_parameters(MODEL)[0] == 24 * (7 * feed + router)
    assert active_parameters(mixture) - active_parameters(MODEL) == 24 * (feed + router)
    (one,), (many,) = (memory_of(model, Layout(), Software()) for model in (MODEL, mixture))
    assert many.weight_bytes - one.weight_bytes == 24 * (7 * feed + router) * 2


@given(shard=st.sampled_from([0, 1, 2]), data=st.sampled_from([2, 4, 8]))
def test_each_stage_of_sharding_holds_less(shard: int, data: int) -> None:
    layout = Layout(data=data, global_batch=data, shard=shard)
    (memory,) = memory_of(MODEL, layout, Software())
    (more,) = memory_of(MODEL, structs.replace(layout, shard=shard + 1), Software())
    assert more.total_bytes < memory.total_bytes
    names = ("state_bytes", "gradient_bytes", "weight_bytes")
    assert getattr(more, names[shard]) == pytest.approx(getattr(memory, names[shard]) / data, rel=1e-6)


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer_whole() -> None:
    layout = Layout(micro_batch=2, global_batch=2)
    none, full = (memory_of(MODEL, structs.replace(layout, recompute=r), Software())[0] for r in ("none", "full"))
    one = none.activation_bytes / 24
    assert full.activation_bytes == pytest.approx(24 * 1024 * 2 * 2048 * 2 + one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(ScheduleKind))
@given(
    stages=st.integers(1, 6),
    rounds=st.integers(2, 12),
    chunks=st.integers(1, 4),
)
def test_what_is_in_flight_is_what_the_whole_schedule_holds(kind: str, stages: int, rounds: int, chunks: int) -> None:
    chunks = chunks if kind in LOOPED else 1
    micro = rounds * stages
    layout = Layout(pipeline=stages, global_batch=micro, schedule=kind, chunks=chunks)  # type: ignore[arg-type]
    parts = layout.parts_per_stage
    if stages == 1:
        assert in_flight(layout, 0) == parts * (micro if kind in ("gpipe", "looped-bfs") else 1)
        return
    table = schedule_table(kind, stages=stages, micro_batches=micro, chunks=parts)  # type: ignore[arg-type]
    for stage, row in enumerate(table):
        held: set[tuple[int, int]] = set()
        most = 0
        actions = [action for entry in row for action in actions_of(entry)]
        late = {action[1:] for action in actions if action.kind == "W"}
        for action in actions:
            if action.kind == "F":
                held.add(action[1:])
            elif action.kind == "W" or action[1:] not in late:
                held.remove(action[1:])
            most = max(most, len(held))
        assert in_flight(layout, stage) == most


def test_the_last_stage_holds_the_logits_and_its_own_output_layer() -> None:
    untied = structs.replace(MODEL, is_tied=False)
    first, last = memory_of(untied, Layout(pipeline=2, global_batch=8), Software())
    assert first.logits_bytes == 0
    assert last.logits_bytes == 1024 * 50304 * 10
    assert first.weight_bytes == last.weight_bytes
    assert first.activation_bytes == 2 * last.activation_bytes


MIXTURE = structs.replace(MODEL, num_experts=8, experts_per_token=2)
LONG = structs.replace(MODEL, seq=65536)


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(ScheduleKind))
@given(
    layers=st.integers(16, 40),
    stages=st.sampled_from([2, 4, 8]),
    tensor=st.sampled_from([1, 2]),
    is_tied=st.booleans(),
)
def test_stages_together_hold_the_whole_model(
    kind: ScheduleKind, layers: int, stages: int, tensor: int, is_tied: bool
) -> None:
    """And the embedding twice, where the last stage needs what the first has."""
    model = structs.replace(MODEL, layers=layers, is_tied=is_tied)
    layout = Layout(pipeline=stages, tensor=tensor, global_batch=2 * stages, schedule=kind)
    of_layers, of_embedding = num_parameters(model)
    embeddings = 1 if is_tied and kind in FOLDED else 2
    every = memory_of(model, layout, Software())
    assert sum(m.weight_bytes for m in every) * tensor == pytest.approx(
        2 * (of_layers + embeddings * of_embedding), rel=1e-9
    )
    assert sum(m.logits_bytes > 0 for m in every) == 1


@pytest.mark.slow
@given(
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([2, 4, 8]),
    context=st.sampled_from([1, 2]),
    expert=st.sampled_from([1, 2]),
    shard=st.sampled_from([0, 1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
def test_more_sharding_never_takes_more(
    pipeline: int, data: int, context: int, expert: int, shard: int, recompute: str
) -> None:
    model = structs.replace(MIXTURE, layers=24)
    layout = Layout(
        pipeline=pipeline,
        data=data,
        context=context,
        expert=expert,
        shard=shard,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        global_batch=data * pipeline,
    )
    less, more = (
        memory_of(model, one, Software())
        for one in (layout, structs.replace(layout, shard=shard + 1))  # type: ignore[arg-type]
    )
    assert all(b.total_bytes <= a.total_bytes for a, b in zip(less, more, strict=True))
    if shard:
        grouped = memory_of(model, structs.replace(layout, shard_ranks=data // 2 or 1), Software())
        assert all(a.total_bytes <= g.total_bytes for a, g in zip(less, grouped, strict=True))


def test_under_a_pipeline_gradients_and_weights_stay_whole_until_the_last_micro_batch() -> None:
    for shard in (1, 2, 3):
        layout = Layout(data=8, shard=shard, global_batch=64)  # type: ignore[arg-type]
        (alone,) = memory_of(MODEL, layout, Software())
        staged = memory_of(MODEL, structs.replace(layout, pipeline=2), Software())[0]
        assert staged.gradient_bytes > 0.9 * alone.gradient_bytes * (8 if shard >= 2 else 1) / 2
        assert staged.weight_bytes > 0.9 * alone.weight_bytes * (8 if shard == 3 else 1) / 2


def test_context_ranks_divide_activations_and_share_what_is_sharded() -> None:
    (one,) = memory_of(LONG, Layout(global_batch=1, shard=3), Software())
    (eight,) = memory_of(LONG, Layout(global_batch=1, shard=3, context=8), Software())
    assert eight.logits_bytes == one.logits_bytes // 8
    assert eight.weight_bytes == one.weight_bytes // 8
    # but for keys and values, which are gathered whole
    kept = 24 * 65536 * 2 * 2048 * 2
    assert eight.activation_bytes == pytest.approx((one.activation_bytes - kept) / 8 + kept)
    (ring,) = memory_of(LONG, Layout(global_batch=1, shard=3, context=8), Software(context_exchange="ring"))
    assert ring.activation_bytes == pytest.approx(one.activation_bytes / 8)


def test_expert_ranks_divide_the_experts_and_no_more() -> None:
    one, eight = (memory_of(MIXTURE, Layout(data=8, expert=e, global_batch=8), Software())[0] for e in (1, 8))
    feed = 2 * 2048 * 4 * 2048
    assert one.weight_bytes - eight.weight_bytes == 24 * 7 * feed * 2
    shards = [memory_of(MIXTURE, Layout(data=8, expert=e, global_batch=8, shard=1), Software())[0] for e in (1, 8)]
    assert shards[0].state_bytes == pytest.approx(shards[1].state_bytes)  # all eight divide everything either way


def test_what_is_offloaded_lies_on_the_host() -> None:
    plain, state, weights = (
        memory_of(MODEL, Layout(global_batch=8, offload=o), Software())[0]  # type: ignore[arg-type]
        for o in ("none", "state", "weights")
    )
    assert state.host_bytes == plain.state_bytes
    assert weights.host_bytes == plain.weight_bytes + plain.gradient_bytes + plain.state_bytes
    assert plain.host_bytes == 0
    assert weights.total_bytes < state.total_bytes < plain.total_bytes
    # it comes in whole for the update, when activations are gone
    assert state.state_bytes == plain.state_bytes - plain.activation_bytes - plain.logits_bytes


def test_what_compression_leaves_out_is_kept() -> None:
    of_layers, of_embedding = num_parameters(MODEL)
    for kind, copies in (("none", 0.0), ("bfloat16", 1.125), ("powersgd", 1.0), ("sign", 1.0)):
        (memory,) = memory_of(MODEL, Layout(data=8, global_batch=8, compression=kind), Software())  # type: ignore[arg-type]
        assert memory.feedback_bytes == int(4 * copies * (of_layers + of_embedding))


def test_single_precision_takes_twice_as_much() -> None:
    half, single = (memory_of(MODEL, Layout(), Software(dtype=d))[0] for d in ("bfloat16", "float32"))
    assert single.weight_bytes == 2 * half.weight_bytes
    assert 1.5 * half.activation_bytes < single.activation_bytes < 2 * half.activation_bytes
