"""Collectives and the steps of this rank, where the process is one rank of several."""

from __future__ import annotations

from typing import Final

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState


def _build(observation: ObservationState) -> Collector | None:
    if observation.place is None:
        return None
    from flatout.check.observe.ranks.watch import RankWatch  # there are builds of torch without torch.distributed

    return RankWatch(observation, observation.place)


COLLECTOR: Final = CollectorEntry(_build, order=1)
"""After the others: a rank's summary names its hottest lines, those of its loader's workers included."""
