"""Values that leave for NumPy and come back to torch, from the lines that called `.numpy()` and their source."""

from __future__ import annotations

import linecache
from typing import Final

import msgspec

from flatout.check.observe.array_flow import array_flows
from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import RoundTrip
from flatout.core.runtime.source_sites import Sites
from flatout.machine.cost.accounting import group_by


class RoundTrips(Collector):
    """Reads the source around calls of `Tensor.numpy` that were observed outside the loaders."""

    def __init__(self, sites: Sites) -> None:
        self._sites = sites

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `round_trips` to the Evidence."""
        sources = self._sites.table()
        left = {u.source for u in evidence.uses if u.name == "Tensor.numpy" and u.phase != "data" and u.source >= 0}
        own = [sources[index] for index in left if not sources[index].library]
        trips = tuple(
            RoundTrip(file=file, away=flow.away, back=flow.back, spans=flow.spans)
            for file, lines in group_by(own, lambda source: source.file).items()
            for flow in array_flows("".join(linecache.getlines(file)), {source.line for source in lines})
        )
        return msgspec.structs.replace(evidence, round_trips=trips)


COLLECTOR: Final = CollectorEntry(lambda observation: RoundTrips(observation.sites), order=1)
"""After the collectors that fill in `uses`."""
