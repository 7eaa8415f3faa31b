"""What flatout's executor takes, against what it took: steps measured on one and on two H200s."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from flatout.core.records.scale import Constants, Layout, MeasuredStep, ModelShape
from flatout.scale.executor import EXECUTOR
from flatout.scale.inputs import cluster_of
from flatout.scale.memory import memory_of, with_libraries
from flatout.scale.step import step_time

RESULTS = Path(__file__).parents[2] / "bench" / "results"
LLAMA = ModelShape(hidden=4096, layers=8, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=2048, is_gated=True)


@pytest.mark.parametrize("name", ["wide", "deep"])
@pytest.mark.parametrize(
    ("file", "fewest"),
    [("2026-11-22-h200-x2/layouts", 12), ("2026-11-29-h200-x2/layouts", 9), ("2026-11-28-h200/layouts_rounds", 8)],
)
def test_peaks_are_those_that_were_measured_and_none_is_falsely_said_to_fit(file: str, fewest: int, name: str) -> None:
    found = json.loads((RESULTS / f"{file}.json").read_text())
    steps = msgspec.convert(found[name]["steps"], list[MeasuredStep])
    errors = []
    for step in steps:
        assert step.peak_bytes is not None
        stages, peak = memory_of(step.model, step.layout, EXECUTOR), max(step.peak_bytes)
        errors.append(max(s.total_bytes - s.slack_bytes for s in stages) / peak - 1)
        assert max(s.total_bytes for s in stages) >= with_libraries(peak), step.layout
    assert len(errors) >= fewest
    assert sum(map(abs, errors)) / len(errors) < 0.03
    assert max(map(abs, errors)) < 0.1


def test_micro_batches_that_are_added_up_hold_whole_gradients() -> None:
    one, many = (Layout(data=2, shard=1, global_batch=2 * n) for n in (1, 8))
    assert memory_of(LLAMA, many, EXECUTOR)[0].gradient_bytes > 2 * memory_of(LLAMA, one, EXECUTOR)[0].gradient_bytes
    assert memory_of(LLAMA, many, EXECUTOR)[0].total_bytes > memory_of(LLAMA, one, EXECUTOR)[0].total_bytes


def test_sharding_more_never_takes_more() -> None:
    total = [
        memory_of(LLAMA, Layout(data=4, shard=shard, global_batch=16), EXECUTOR)[0].total_bytes
        for shard in (0, 1, 2, 3)
    ]
    assert total == sorted(total, reverse=True)


def test_divided_operators_make_the_host_the_limit_of_small_micro_batches() -> None:
    cluster, constants = cluster_of("2xh200"), Constants()

    def host_s(software: object, samples: int) -> float:
        layout = Layout(tensor=2, micro_batch=samples, global_batch=samples, is_sequence_parallel=True)
        return step_time(LLAMA, layout, cluster, software, constants).host_s  # type: ignore[arg-type]

    assert host_s(EXECUTOR, 1) > 0 == host_s(structs.replace(EXECUTOR, divided_by="code"), 8)
    assert host_s(EXECUTOR, 1) > host_s(EXECUTOR, 8)
