from __future__ import annotations

import pytest
from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import Constants, ModelShape, Software
from flatout.machine.specs.catalog import load_spec
from flatout.scale.candidates import Space, layouts
from flatout.scale.inputs import cluster_of
from flatout.scale.memory import memory_of
from flatout.scale.search import model_flop, ranked_layouts
from flatout.scale.step import step_time

MODEL = ModelShape(hidden=4096, layers=32, heads=32, vocab=50304, seq=2048)
CLUSTER = cluster_of("16xa100-80gb")
LARGE = ModelShape(hidden=12288, layers=96, heads=96, vocab=50304, seq=2048)


@pytest.mark.slow
@pytest.mark.long
def test_the_first_is_the_fastest_of_all_that_fit() -> None:
    found = ranked_layouts(MODEL, CLUSTER, 64, Software(), Constants())
    spec = load_spec(CLUSTER.device)
    assert spec.memory_bytes is not None
    fitting = [
        layout
        for layout in layouts(MODEL, CLUSTER, 64)
        if max(m.total_bytes for m in memory_of(MODEL, layout, Software())) <= spec.memory_bytes.value
    ]
    assert found.num_layouts - found.num_too_large == len(fitting)
    best = min(step_time(MODEL, layout, CLUSTER, Software(), Constants()).total_s for layout in fitting)
    assert found.best[0].step.total_s == best
    assert [r.step.total_s for r in found.best] == sorted(r.step.total_s for r in found.best)
    assert all(r.memory.total_bytes <= spec.memory_bytes.value for r in found.best)


def test_layouts_use_all_devices_once_each() -> None:
    every = list(layouts(MODEL, CLUSTER, 64))
    assert len(set(every)) == len(every)
    assert all(layout.num_devices == 16 for layout in every)
    assert all(layout.tensor <= 8 for layout in every)


def test_more_memory_is_asked_for_than_there_is() -> None:
    alone = structs.replace(cluster_of("8xa100-80gb"), host=None)
    found = ranked_layouts(LARGE, alone, 8, Software(), Constants())
    assert not found.best
    assert found.num_too_large == found.num_layouts
    assert found.smallest is not None
    assert found.smallest.total_bytes > 80 << 30


def test_a_batch_that_nothing_divides_is_told() -> None:
    with pytest.raises(PlanError, match="no layout divides 32 heads, 32 layers and a batch of 7"):
        ranked_layouts(MODEL, cluster_of("1024xh100-sxm"), 7, Software(), Constants())


def test_useful_work_is_six_operations_a_parameter_and_token() -> None:
    assert model_flop(MODEL, 1) == pytest.approx(
        6 * 2048 * (12 * 4096**2 * 32 + 50304 * 4096) + 6 * 32 * 2048**2 * 4096
    )


@pytest.mark.slow
def test_what_fits_nowhere_else_is_offloaded_and_that_is_said() -> None:
    small = cluster_of("8xa100-80gb", host_bytes=400 * 2**30)
    found = ranked_layouts(LARGE, small, 8, Software(), Constants())
    assert found.best
    assert found.widened == "weights, gradients and the optimizer's state kept in the host's memory"
    assert all(r.layout.offload == "weights" for r in found.best)
    assert all(r.memory.host_bytes <= 400 * 2**30 for r in found.best)
    assert all(r.step.offload_s > 0 for r in found.best)
    on_disk = ranked_layouts(LARGE, cluster_of("8xa100-80gb", host_bytes=100 * 2**30), 8, Software(), Constants())
    assert on_disk.widened.endswith("on its disk")
    assert on_disk.best[0].step.total_s > found.best[0].step.total_s


@pytest.mark.slow
def test_what_fits_is_not_offloaded_and_short_samples_are_not_divided() -> None:
    found = ranked_layouts(MODEL, CLUSTER, 64, Software(), Constants())
    assert found.widened == ""
    assert all(r.layout.offload == "none" and r.layout.context == 1 for r in found.best)


def test_long_samples_are_divided_by_tokens() -> None:
    long = structs.replace(MODEL, seq=131072)
    contexts = {layout.context for layout in layouts(long, CLUSTER, 16)}
    assert contexts == {1, 2, 4, 8, 16}
    longer = structs.replace(MODEL, seq=1 << 19)
    found = ranked_layouts(longer, cluster_of("64xh100-sxm"), 1, Software(), Constants())
    assert found.best[0].layout.context > 1
    assert found.widened == ""


def test_experts_are_spread_where_there_are_some() -> None:
    mixture = structs.replace(MODEL, num_experts=8, experts_per_token=2)
    every = list(layouts(mixture, CLUSTER, 64))
    assert {layout.expert for layout in every} == {1, 2, 4, 8}
    assert {layout.expert for layout in layouts(MODEL, CLUSTER, 64)} == {1}


def test_gradients_are_compressed_only_when_asked() -> None:
    assert all(layout.compression == "none" for layout in layouts(MODEL, CLUSTER, 64))
    asked = list(layouts(MODEL, CLUSTER, 64, Space(compressions=("powersgd", "sign"))))
    assert {layout.compression for layout in asked} >= {"none", "powersgd"}
    assert all(layout.tensor == layout.pipeline == 1 for layout in asked if layout.compression != "none")


@pytest.mark.slow
def test_every_schedule_that_is_proposed_can_be_played() -> None:
    kinds = set()
    for layout in layouts(MODEL, CLUSTER, 64):
        if layout.micro_batch == 1 and layout.recompute == "none":
            step_time(MODEL, layout, CLUSTER, Software(), Constants())
            kinds.add(layout.schedule)
    assert kinds == {"1f1b", "interleaved", "zero-bubble", "zbv", "dualpipev"}


def test_stages_that_hold_their_weights_whole_get_no_shards_of_them() -> None:
    """torch keeps them gathered from the first micro-batch to the last."""
    assert all(layout.shard == 1 for layout in layouts(MODEL, CLUSTER, 64) if layout.pipeline > 1 and layout.data > 1)
    assert any(layout.shard_ranks == 8 and layout.shard == 3 for layout in layouts(MODEL, CLUSTER, 64))
