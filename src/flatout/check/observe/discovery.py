"""Finds the constants COLLECTOR in the modules of `flatout.check.observe.collectors`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from flatout.check.observe.collector import Collector
from flatout.check.observe.observation import ObservationState
from flatout.core.registry import constants

_PACKAGE: Final = "flatout.check.observe.collectors"


class CollectorEntry(NamedTuple):
    """The constant COLLECTOR of a module: builds the collector, or None where the run has no use for it.

    Collectors begin and add to the Evidence by `order`, equal ones by the name of their module, and end in reverse order.
    """

    build: Callable[[ObservationState], Collector | None]
    order: int = 0


def import_collectors() -> None:
    """Import all collectors now, which takes a quarter of a second, and not when a run begins."""
    constants(_PACKAGE, "COLLECTOR")


def collectors_of(observation: ObservationState) -> tuple[Collector, ...]:
    """All collectors of an observation, in their order."""
    entries: list[CollectorEntry] = sorted(constants(_PACKAGE, "COLLECTOR"), key=lambda entry: entry.order)
    built = (entry.build(observation) for entry in entries)
    return tuple(collector for collector in built if collector is not None)
