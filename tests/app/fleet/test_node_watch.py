from __future__ import annotations

import pytest
from tests.fleet_jobs import job

from flatout.app.fleet import node_watch
from flatout.app.fleet.identity import JobPlace
from flatout.app.fleet.node_watch import NodeWatch
from flatout.core.records.job import NodeHealth
from flatout.machine.measure.gpu_sensors import GpuReading


class FakeSensors:
    """One hot and one cool GPU."""

    def __init__(self, uuids: object) -> None:
        pass

    def read(self) -> list[GpuReading]:
        return [GpuReading(0.5, ("temperature (hardware)",), 90.0, 1), GpuReading(1.0, (), 60.0, None)]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> NodeWatch:
    monkeypatch.setattr(node_watch, "GpuSensors", FakeSensors)
    monkeypatch.setattr(node_watch, "_uuids", lambda number: [])
    monkeypatch.setattr(NodeWatch, "_memory_bytes", lambda self: 7)
    return NodeWatch(job(), JobPlace(0, 2, 0, 2))


def size(one: object) -> int:
    """Objects in the lists and tables that this holds, however deep."""
    if isinstance(one, list | tuple | dict):
        return len(one) + sum(map(size, one.values() if isinstance(one, dict) else one))
    return size(vars(one)) if hasattr(one, "__dict__") else 0


def test_samples_become_means_and_extremes(watch: NodeWatch) -> None:
    for _ in range(4):
        watch.sample()

    found = watch.readings()
    assert found.utilisation == 0.75
    assert found.health == NodeHealth(
        num_samples=4,
        throttled_fraction=0.5,
        throttled_because="temperature (hardware)",
        hottest_c=90.0,
        ecc_errors=1,
    )


def test_a_job_of_months_takes_no_more_room_than_one_of_minutes(watch: NodeWatch) -> None:
    watch.sample()
    before = size(watch)
    for _ in range(1000):
        watch.sample()

    assert size(watch) == before


def test_without_samples_nothing_is_known(watch: NodeWatch) -> None:
    assert watch.readings().utilisation is None
    assert watch.readings().health == NodeHealth()
