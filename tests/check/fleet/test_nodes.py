from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fleet_jobs import job

from flatout.check.fleet.nodes import sick_nodes_of
from flatout.core.records.job import JobRecord, NodeHealth


def healthy(number: int, *, nodes: int = 10, seed: int = 0, failing: float = 0.05) -> list[JobRecord]:
    """Jobs of twelve workloads spread over nodes that differ by 3 %."""
    draw = random.Random(seed)
    return [
        job(
            i,
            workload=f"w{i % 12}",
            node=f"n{draw.randrange(nodes)}",
            step_s=0.1 * (1 + i % 12) * draw.uniform(0.97, 1.03),
            outcome="failed" if draw.random() < failing else "finished",
        )
        for i in range(number)
    ]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1000))
def test_healthy_nodes_are_rarely_named(seed: int) -> None:
    assert len(sick_nodes_of(healthy(200, seed=seed))) <= 1


def test_a_slow_node_is_named_with_how_slow_it_is() -> None:
    rows = [r for r in healthy(200) if r.node != "n3"]
    rows += [job(1000 + i, workload=f"w{i}", node="n3", step_s=0.1 * (1 + i) * 1.3) for i in range(8)]

    (found,) = [n for n in sick_nodes_of(rows) if n.slowdown is not None]
    assert found.node == "n3"
    assert found.slowdown == pytest.approx(1.3, rel=0.05)
    assert "8 of 8 jobs" in found.because[0]


def test_two_slow_jobs_are_too_few_to_blame_a_node() -> None:
    rows = [r for r in healthy(200) if r.node != "n3"]
    rows += [job(1000 + i, workload=f"w{i}", node="n3", step_s=0.1 * (1 + i) * 1.3) for i in range(2)]

    assert all(n.node != "n3" for n in sick_nodes_of(rows))


def test_a_slow_workload_is_not_blamed_on_its_node() -> None:
    rows = healthy(100) + [job(1000 + i, workload="only here", node="n3", step_s=9.0) for i in range(10)]

    assert all(n.slowdown is None for n in sick_nodes_of(rows))


def test_jobs_on_several_nodes_do_not_say_which_is_slow() -> None:
    rows = healthy(100)
    rows += [
        job(1000 + i, workload=f"w{i % 12}", node="n3", step_s=1.3 * (1 + i % 12), world_size=16) for i in range(20)
    ]

    assert all(n.slowdown is None for n in sick_nodes_of(rows))


def test_a_node_where_jobs_fail_is_named() -> None:
    rows = healthy(200, failing=0.02) + [job(1000 + i, node="bad", outcome="failed") for i in range(6)]

    (found,) = [n for n in sick_nodes_of(rows) if n.node == "bad"]
    assert "6 of 6 jobs failed there" in found.because[0]


def test_a_bad_week_of_all_nodes_is_no_nodes_fault() -> None:
    assert sick_nodes_of([job(i, node=f"n{i % 10}", outcome="failed") for i in range(100)]) == []


def test_throttled_gpus_and_memory_errors_are_named() -> None:
    hot = NodeHealth(num_samples=100, throttled_fraction=0.4, throttled_because="temperature (hardware)")
    rows = [*healthy(50), job(1000, node="hot", health=hot), job(1001, node="ecc", health=NodeHealth(ecc_errors=2))]

    found = {n.node: n.because for n in sick_nodes_of(rows)}
    assert "40 % of samples: temperature (hardware)" in found["hot"][0]
    assert "2 memory errors" in found["ecc"][0]
