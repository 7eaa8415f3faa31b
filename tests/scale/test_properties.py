"""What must hold of a step's time whatever the layout is."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from flatout.core.records.scale import LOOPED, Constants, Layout, ModelShape, ScheduleKind, Software, StepTime
from flatout.scale.inputs import cluster_of
from flatout.scale.step import step_time

pytestmark = pytest.mark.slow

MODEL = ModelShape(hidden=2048, layers=24, heads=16, vocab=50304, seq=4096, num_experts=4, experts_per_token=2)
CLUSTER = cluster_of("256xh100-sxm")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    kind: ScheduleKind = draw(st.sampled_from(get_args(ScheduleKind)))
    pipeline, data = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    micro_batch = draw(st.sampled_from([1, 2]))
    shard = draw(st.sampled_from([0, 1, 2, 3]))
    groups = draw(st.sampled_from([0, 2])) if data > 1 else 0
    compression = draw(st.sampled_from(["none", "bfloat16", "powersgd", "sign"])) if shard == 0 and data > 1 else "none"
    return Layout(
        tensor=draw(st.sampled_from([1, 2, 4])),
        context=draw(st.sampled_from([1, 2])),
        pipeline=pipeline,
        data=data,
        expert=draw(st.sampled_from([1, 2])) if data > 1 else 1,
        micro_batch=micro_batch,
        global_batch=data * micro_batch * pipeline * draw(st.sampled_from([2, 4])),
        schedule=kind,
        chunks=draw(st.sampled_from([1, 2])) if kind in LOOPED and pipeline > 1 else 1,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        shard=shard,
        shard_ranks=groups,
        is_sequence_parallel=draw(st.booleans()),
        offload=draw(st.sampled_from(["none", "state", "weights"])),
        offload_to=draw(st.sampled_from(["host", "disk"])),
        compression=compression,
    )


def taken(layout: Layout, constants: Constants | None = None) -> StepTime:
    return step_time(MODEL, layout, CLUSTER, Software(gradient_bytes=4), constants or Constants(straggler_share=0.01))


def parts(step: StepTime) -> dict[str, float]:
    return {name: getattr(step, name) for name in StepTime.__struct_fields__ if name != "total_s"}


@settings(max_examples=60, deadline=None)
@given(layout=layouts())
def test_the_total_is_the_sum_of_its_parts_and_none_is_negative(layout: Layout) -> None:
    step = taken(layout)
    assert sum(parts(step).values()) == pytest.approx(step.total_s, rel=1e-9)
    assert min(parts(step).values()) >= -1e-12


@settings(max_examples=40, deadline=None)
@given(layout=layouts())
def test_twice_the_data_ranks_never_compute_more_at_the_same_batch(layout: Layout) -> None:
    more = layout.num_micro_batches // 2 * 2
    layout = structs.replace(layout, global_batch=layout.data * layout.micro_batch * more, expert=1, shard_ranks=0)
    assume(more >= 4 * layout.pipeline or layout.schedule not in ("dualpipev", "interleaved", "zero-bubble"))
    twice = structs.replace(layout, data=2 * layout.data)
    assert taken(twice).compute_s <= taken(layout).compute_s * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts(),
    field=st.sampled_from(["operator_s", "collective_s", "kernel_s", "step_s", "contention_share", "straggler_share"]),
)
def test_what_is_slower_never_makes_a_faster_step(layout: Layout, field: str) -> None:
    usual = Constants(straggler_share=0.01)
    worse = structs.replace(usual, **{field: 2 * getattr(usual, field)})
    assert taken(layout, worse).total_s >= taken(layout, usual).total_s - 1e-12


@settings(max_examples=40, deadline=None)
@given(layout=layouts())
def test_recomputing_less_is_never_slower(layout: Layout) -> None:
    """The search leaves out what computes more again than it must."""
    layout = structs.replace(layout, offload="none")
    none, some, full = (taken(structs.replace(layout, recompute=r)) for r in ("none", "selective", "full"))
    assert none.total_s <= some.total_s + 1e-12
    assert some.total_s <= full.total_s + 1e-12


@settings(max_examples=30, deadline=None)
@given(pipeline=st.sampled_from([2, 4, 8]), rounds=st.integers(1, 6))
def test_the_bubble_of_equal_stages_is_that_of_the_closed_form(pipeline: int, rounds: int) -> None:
    """(p - 1) / m, for stages that differ by a small head alone and links that cost nothing."""
    model = structs.replace(MODEL, vocab=8, num_experts=1, experts_per_token=1)
    free = structs.replace(
        CLUSTER, tiers=tuple(structs.replace(tier, bytes_per_s=1e18, latency_s=0.0) for tier in CLUSTER.tiers)
    )
    micro = rounds * pipeline
    layout = Layout(pipeline=pipeline, global_batch=micro)
    step = step_time(model, layout, free, Software(), Constants())
    work_s = step.compute_s + step.host_s
    assert step.bubble_s == pytest.approx((pipeline - 1) / micro * work_s, rel=0.02)
