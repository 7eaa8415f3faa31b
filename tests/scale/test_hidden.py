"""What software leaves out, hides behind work, or sends in fewer bits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from flatout.core.records.scale import Constants, Layout, ModelShape, Software
from flatout.scale.inputs import cluster_of
from flatout.scale.memory import memory_of
from flatout.scale.presets import PRESETS
from flatout.scale.step import step_time
from flatout.scale.usual import usual_constants

LLAMA = ModelShape(
    hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=4096, is_gated=True, is_tied=False
)
EXPERTS = structs.replace(LLAMA, num_experts=8, experts_per_token=2)
CORE = PRESETS["megatron-core"].software


def seconds(layout: Layout, software: Software, model: ModelShape = LLAMA, devices: str = "8xh100-sxm") -> float:
    cluster = cluster_of(devices)
    return step_time(model, layout, cluster, software, usual_constants(model, cluster, software).constants).total_s


@pytest.mark.parametrize("model", [LLAMA, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor", [1, 4])
def test_recomputing_that_stops_early_leaves_out_the_last_product_and_its_collective(
    model: ModelShape, tensor: int
) -> None:
    """A gated feed-forward has three products alike: what is computed again is at most a forward less the last of them."""
    layout = Layout(tensor=tensor, data=8 // tensor, global_batch=32, recompute="full", is_sequence_parallel=tensor > 1)
    whole = structs.replace(CORE, stops_early=False)
    none = seconds(structs.replace(layout, recompute="none"), whole, model)
    full = seconds(layout, whole, model) - none
    early = seconds(layout, structs.replace(whole, stops_early=True), model) - none
    assert 0.55 * full < early < 0.85 * full


@given(st.sampled_from(["float8", "mxfp8", "nvfp4"]), st.sampled_from([8, 16, 64]))
def test_weights_that_are_cast_once_cost_less_the_more_micro_batches_there_are(dtype: str, batch: int) -> None:
    device = "8xgb200"
    each = structs.replace(CORE, dtype=dtype, casts_weights_once=False)
    once = structs.replace(each, casts_weights_once=True)

    def gain(batch: int) -> float:
        layout = Layout(data=8, global_batch=batch, shard=1)
        return 1 - seconds(layout, once, devices=device) / seconds(layout, each, devices=device)

    assert gain(8) == pytest.approx(0.0, abs=1e-9)  # one micro-batch a rank: once is each
    assert gain(batch) >= gain(8) - 1e-9
    assert gain(64) > 0.01


def test_casts_once_change_nothing_in_half_precision() -> None:
    layout = Layout(data=8, global_batch=64, shard=1)
    assert seconds(layout, CORE) == seconds(layout, structs.replace(CORE, casts_weights_once=False))


def test_lora_casts_no_copy_for_gradients_of_frozen_weights() -> None:
    layout = Layout(data=8, global_batch=64)
    lora = structs.replace(CORE, dtype="float8", trained_share=0.006)
    full = structs.replace(lora, trained_share=1.0)
    half = structs.replace(lora, dtype="bfloat16")
    assert seconds(layout, lora) < 0.75 * seconds(layout, full)
    assert seconds(layout, lora) < seconds(layout, half)


def test_weights_gathered_ahead_hide_behind_the_forward() -> None:
    layout = Layout(tensor=8, pipeline=4, data=4, global_batch=64, shard=1, is_sequence_parallel=True)
    model = structs.replace(LLAMA, hidden=8192, layers=80, heads=64, ffn=28672)
    late = structs.replace(CORE, gathers_ahead=False)
    many = "128xh100-sxm"
    assert seconds(layout, CORE, model, many) < seconds(layout, late, model, many)


def test_interleaved_stages_hide_more_of_what_is_reduced() -> None:
    """Gradients of a chunk are whole while other chunks still go backward."""
    model = structs.replace(LLAMA, hidden=12288, layers=96, heads=96, kv_heads=None, ffn=None, is_gated=False)
    cluster = cluster_of("128xh100-sxm", fabric_bytes_per_s=2e10)
    constants = usual_constants(model, cluster, CORE).constants
    plain = Layout(tensor=8, pipeline=8, data=2, global_batch=16, shard=1, is_sequence_parallel=True)
    chunks = structs.replace(plain, schedule="interleaved", chunks=6)
    exposed = [step_time(model, one, cluster, CORE, constants).data_s for one in (plain, chunks)]
    assert exposed[1] < 0.7 * exposed[0]


def test_eight_bits_are_gathered_in_eight_bits() -> None:
    layout = Layout(data=64, global_batch=64, shard=3)
    model = structs.replace(LLAMA, hidden=8192, layers=40, heads=64, ffn=28672)
    cluster = cluster_of("64xh100-sxm", fabric_bytes_per_s=5e9)
    small = structs.replace(CORE, dtype="float8")
    wide = structs.replace(small, gathers_eight=False)
    constants = usual_constants(model, cluster, small).constants
    data_s = [step_time(model, layout, cluster, one, constants).data_s for one in (small, wide)]
    assert data_s[0] < 0.8 * data_s[1]
    half = structs.replace(CORE, dtype="bfloat16")
    assert seconds(layout, half, model, "64xh100-sxm") == seconds(
        layout, structs.replace(half, gathers_eight=False), model, "64xh100-sxm"
    )


def test_tensor_ranks_that_divide_tokens_send_their_own_to_the_next_stage() -> None:
    layout = Layout(tensor=8, pipeline=8, data=1, global_batch=16, schedule="interleaved", chunks=4)
    cluster = cluster_of("64xh100-sxm", fabric_bytes_per_s=1e9)  # a fabric on which sending is all that matters
    whole, divided = (
        step_time(LLAMA, structs.replace(layout, is_sequence_parallel=is_divided), cluster, CORE, Constants()).total_s
        for is_divided in (False, True)
    )
    assert divided < 0.5 * whole


def test_eager_layers_of_gates_read_and_write_more() -> None:
    layout = Layout(data=8, global_batch=16, shard=3)
    plain = structs.replace(LLAMA, is_gated=False, ffn=21504)  # as many parameters
    software = PRESETS["fsdp1"].software
    fused = structs.replace(software, traffic=1.0, gated_traffic=1.0)
    extra = [seconds(layout, software, m) - seconds(layout, fused, m) for m in (LLAMA, plain)]
    assert extra[0] > 2 * extra[1] > 0


def test_every_other_product_is_saved_where_operators_are_recomputed() -> None:
    """torchtitan saves q, v, w1, w2 of q, k, v, o, w1, w3, w2, what attention gives, and a layer's input."""
    layout = Layout(data=8, global_batch=8, shard=3, recompute="operators")
    software = PRESETS["fsdp2"].software
    saved = 4096 * 2 * (4096 + 2 * 4096 + 1024 + 14336 + 4096) * 32
    assert memory_of(LLAMA, layout, software)[0].activation_bytes == pytest.approx(saved)
