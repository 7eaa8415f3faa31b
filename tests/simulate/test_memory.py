from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flatout.cost.schedules import table_of
from flatout.records.scale import Layout, ModelShape, Software
from flatout.simulate.memory import in_flight, memory_of
from flatout.simulate.step import num_active, num_parameters

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
    of_layer, of_embedding = num_parameters(model)
    assert states == 16 * (96 * of_layer + of_embedding)
    assert states == pytest.approx(2.8e12, rel=0.01)


def test_all_experts_are_held_and_a_token_meets_its_own() -> None:
    mixture = structs.replace(MODEL, num_experts=8, experts_per_token=2)
    feed = 2 * 2048 * 4 * 2048
    assert num_parameters(mixture)[0] - num_parameters(MODEL)[0] == 7 * feed
    assert num_active(mixture) - num_active(MODEL) == feed
    (one,), (many,) = (memory_of(model, Layout(), Software()) for model in (MODEL, mixture))
    assert many.weight_bytes - one.weight_bytes == 24 * 7 * feed * 2


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


@given(
    kind=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    stages=st.integers(1, 6),
    rounds=st.integers(1, 12),
    chunks=st.integers(1, 4),
)
def test_what_is_in_flight_is_what_the_whole_schedule_holds(kind: str, stages: int, rounds: int, chunks: int) -> None:
    chunks = chunks if kind == "interleaved" else 1
    micro = rounds * stages
    layout = Layout(pipeline=stages, global_batch=micro, schedule=kind, chunks=chunks)  # type: ignore[arg-type]
    for stage, row in enumerate(table_of(kind, stages=stages, micro_batches=micro, chunks=chunks)):  # type: ignore[arg-type]
        held = most = 0
        for action in row:
            held += 1 if action.kind == "F" else -1
            most = max(most, held)
        assert in_flight(layout, stage) == most


def test_the_last_stage_holds_the_logits_and_its_own_output_layer() -> None:
    untied = structs.replace(MODEL, is_tied=False)
    first, last = memory_of(untied, Layout(pipeline=2, global_batch=8), Software())
    assert first.logits_bytes == 0
    assert last.logits_bytes == 1024 * 50304 * 10
    assert first.weight_bytes == last.weight_bytes
    assert first.activation_bytes == 2 * last.activation_bytes
