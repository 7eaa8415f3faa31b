from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec import structs

from flatout.errors import PlanError
from flatout.records.scale import Cluster, Constants, Layout, ModelShape, Software, StepTime, Tier
from flatout.simulate.step import num_parameters, step_time

MODEL = ModelShape(hidden=2048, layers=24, heads=16, vocab=50304, seq=1024)
NODE = Cluster(
    device="nvidia-a100-80gb",
    num_devices=8,
    tiers=(Tier(name="nvswitch", reach=8, bytes_per_s=3e11, latency_s=5e-6),),
)
CONSTANTS = Constants()


def taken(layout: Layout, constants: Constants = CONSTANTS, software: Software | None = None) -> StepTime:
    return step_time(MODEL, layout, NODE, software or Software(), constants)


def test_one_device_takes_what_its_operations_take() -> None:
    """6 operations a parameter and token, and those of attention, at the share of the rate that products reach."""
    layout = Layout(micro_batch=8, global_batch=32)
    of_layer, of_head = num_parameters(MODEL)
    tokens = 32 * 1024
    flop = 6 * tokens * (of_layer * 24 + of_head) + 6 * 24 * tokens * 1024 * 2048
    floor_s = flop / (3.12e14 * CONSTANTS.product_share)
    assert floor_s < taken(layout).total_s < 1.5 * floor_s


def test_recomputing_adds_a_forward() -> None:
    plain, again = (taken(Layout(micro_batch=8, global_batch=32, recompute=r)).total_s for r in ("none", "full"))
    assert 1.25 < again / plain < 1.36


def test_what_a_step_is_made_of_adds_up() -> None:
    for layout in (
        Layout(tensor=2, pipeline=2, data=2, global_batch=16),
        Layout(tensor=8, global_batch=8, micro_batch=2),
        Layout(pipeline=4, data=2, global_batch=32, schedule="interleaved", chunks=2),
    ):
        step = taken(layout)
        parts = [getattr(step, name) for name in StepTime.__struct_fields__ if name != "total_s"]
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(step.total_s)


def test_small_parts_of_a_layer_wait_for_the_host() -> None:
    slow_host = structs.replace(CONSTANTS, operator_s=1e-4)
    step = taken(Layout(tensor=8, global_batch=8), slow_host)
    assert step.host_s > step.compute_s
    assert taken(Layout(micro_batch=8, global_batch=8), slow_host).host_s < 0.2 * step.host_s


def test_the_bubble_shrinks_with_micro_batches_and_with_chunks() -> None:
    few, many = (taken(Layout(pipeline=4, global_batch=n)).bubble_s / n for n in (4, 32))
    assert few > 6 * many
    plain = taken(Layout(pipeline=4, global_batch=8))
    interleaved = taken(Layout(pipeline=4, global_batch=8, schedule="interleaved", chunks=2))
    assert interleaved.bubble_s < plain.bubble_s


def test_megatrons_softmax_falls_back_where_heads_do_not_come_in_fours() -> None:
    """16 heads over 8 ranks: one sample has two heads a rank, two samples have four, and then fewer operators are started."""
    software, slow_host = Software(attention="megatron"), structs.replace(CONSTANTS, operator_s=1e-4)
    one = taken(Layout(tensor=8, micro_batch=1, global_batch=8), slow_host, software)
    two = taken(Layout(tensor=8, micro_batch=2, global_batch=16), slow_host, software)
    assert one.total_s > 1.1 * two.total_s


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2, 4]),
    field=st.sampled_from(["operator_s", "collective_s", "kernel_s", "step_s"]),
)
def test_slower_parts_never_make_a_faster_step(
    tensor: int, pipeline: int, data: int, micro_batch: int, field: str
) -> None:
    assume(tensor * pipeline * data <= 8)
    layout = Layout(tensor=tensor, pipeline=pipeline, data=data, micro_batch=micro_batch, global_batch=32)
    slower = structs.replace(CONSTANTS, **{field: 3 * getattr(CONSTANTS, field)})
    assert taken(layout, slower).total_s >= taken(layout).total_s


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match="takes 16 devices, and there are 8"):
        taken(Layout(tensor=8, data=2, global_batch=2))
    with pytest.raises(PlanError, match="no multiple of 2 ranks x 4 samples"):
        Layout(data=2, micro_batch=4, global_batch=12)
    with pytest.raises(PlanError, match="fewer than 32 stages"):
        step_time(MODEL, Layout(pipeline=32), structs.replace(NODE, num_devices=32), Software(), CONSTANTS)
