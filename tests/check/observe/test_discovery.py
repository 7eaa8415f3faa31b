"""Collectors are found in their folder."""

from __future__ import annotations

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.registry import constants


def test_every_collector_in_the_folder_is_part_of_an_observation() -> None:
    capture = Capture(command=("test",), cwd=".", schedule=Schedule(), machine=None, propose=lambda _: ())
    names = [type(collector).__name__ for collector in capture.observation.collectors]
    assert len(names) == len(constants("flatout.check.observe.collectors", "COLLECTOR")) - 1  # no rank among several
    assert len(set(names)) == len(names)
    for collector in capture.observation.collectors:
        collector.close()
