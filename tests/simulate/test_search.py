from __future__ import annotations

import pytest

from flatout.errors import PlanError
from flatout.hardware.catalog import load
from flatout.records.scale import Constants, ModelShape, Software
from flatout.simulate.memory import memory_of
from flatout.simulate.reading import cluster_of
from flatout.simulate.search import layouts, model_flop, ranked
from flatout.simulate.step import step_time

MODEL = ModelShape(hidden=4096, layers=32, heads=32, vocab=50304, seq=2048)
CLUSTER = cluster_of("16xa100-80gb")


def test_the_first_is_the_fastest_of_all_that_fit() -> None:
    found = ranked(MODEL, CLUSTER, 64, Software(), Constants())
    spec = load(CLUSTER.device)
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
    large = ModelShape(hidden=12288, layers=96, heads=96, vocab=50304, seq=2048)
    found = ranked(large, cluster_of("8xa100-80gb"), 8, Software(), Constants())
    assert not found.best
    assert found.num_too_large == found.num_layouts
    assert found.smallest is not None
    assert found.smallest.total_bytes > 80 << 30


def test_a_batch_that_nothing_divides_is_told() -> None:
    with pytest.raises(PlanError, match="no layout divides 32 heads, 32 layers and a batch of 7"):
        ranked(MODEL, cluster_of("1024xh100-sxm"), 7, Software(), Constants())


def test_useful_work_is_six_operations_a_parameter_and_token() -> None:
    assert model_flop(MODEL, 1) == pytest.approx(
        6 * 2048 * (12 * 4096**2 * 32 + 50304 * 4096) + 6 * 32 * 2048**2 * 4096
    )
