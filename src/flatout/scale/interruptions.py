"""A long run played with interruptions of several kinds: what each takes with it, which checkpoint is left, and when nodes are
back.

Rates are published ones, each with its source, and differ from cluster to cluster by several times: `published_kinds` scales
their mix to a total.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import gamma
from random import Random
from statistics import fmean, median
from typing import Final, NamedTuple

from msgspec import structs

from flatout.core.errors import PlanError
from flatout.core.records.failure import CheckpointTier, Fleet, InterruptionKind, Loses, PlayedRun

_ORDER: Final[tuple[Loses, ...]] = ("nothing", "process", "node", "job")
_DAY_S: Final = 86400.0
_LLAMA3: Final = "Grattafiori et al., The Llama 3 herd of models, 2024, table 5: 54 days on 2048 nodes of eight H100"


class PublishedRate(NamedTuple):
    """Interruptions that 1000 nodes cause in a day on one cluster, and who says so."""

    per_thousand_node_days: float
    source: str


PUBLISHED_RATES: Final = (
    PublishedRate(
        2.34, "Kokolis et al., Revisiting reliability in large-scale machine learning research clusters, 2024, RSC-2"
    ),
    PublishedRate(
        3.79, "Grattafiori et al., The Llama 3 herd of models, 2024: 419 unexpected ones in 54 days on 2048 nodes"
    ),
    PublishedRate(4.5, "Scao et al., BLOOM, 2022, section 3.4: one or two a week on 48 nodes"),
    PublishedRate(6.5, "Kokolis et al., 2024, RSC-1"),
    PublishedRate(14.1, "Zhang et al., OPT, 2022, section 2.5: 105 restarts in two months on 124 nodes"),
)
"""The least first. They are of A100 and H100, on Ethernet and InfiniBand, of young and of old clusters."""


def usual_rate() -> float:
    """The median of the published rates."""
    return median(rate.per_thousand_node_days for rate in PUBLISHED_RATES)


_OF_LLAMA3: Final[tuple[tuple[str, float, Loses], ...]] = (
    ("device", 148 + 72 + 19 + 17 + 6 + 6, "node"),  # faulty GPU, HBM3, SRAM, system processor, silent corruption, heat
    (
        "host",
        32 + 3 + 3 + 2 + 2 + 2 + 2,
        "node",
    ),  # maintenance, disk, power, chassis, expansion board, processor, memory
    ("network", 35 + 7, "node"),  # switch and cable, network card
    ("software", 54 + 7 + 2, "process"),  # bugs, watchdogs, dependencies
)
"""Unexpected interruptions by cause, and what each takes with it; 47 more were planned."""
_PLANNED: Final = 47 / 419


def published_kinds(per_thousand_node_days: float) -> tuple[InterruptionKind, ...]:
    """Kinds of interruption in Llama 3's mix, scaled to so many unexpected ones that 1000 nodes cause in a day; planned ones
    besides.
    """
    total = sum(count for _, count, _ in _OF_LLAMA3)
    kinds = [
        InterruptionKind(
            name=name, per_thousand_node_days=per_thousand_node_days * count / total, loses=loses, source=_LLAMA3
        )
        for name, count, loses in _OF_LLAMA3
    ]
    planned = InterruptionKind(
        name="planned", per_thousand_node_days=per_thousand_node_days * _PLANNED, loses="nothing", source=_LLAMA3
    )
    return (*kinds, planned)


def played_run(
    kinds: Sequence[InterruptionKind],
    fleet: Fleet,
    tiers: Sequence[CheckpointTier],
    *,
    days: float,
    rounds: int = 20,
    seed: int = 0,
) -> PlayedRun:
    """The mean of `rounds` runs of so many days. Seconds are played between interruptions; a restart that is interrupted begins
    anew.

    An interruption throws the job back to the newest checkpoint of a tier that outlasts it and has arrived; a planned one saves
    first. A lost node is replaced by a spare one, or waited for until one is repaired.

    Raises PlanError when no tier outlasts a kind that comes.
    """
    for kind in kinds:
        if kind.per_thousand_node_days and not _outlasting(tiers, kind.loses):
            raise PlanError(
                f"no tier of checkpoints outlasts '{kind.name}', which takes the {kind.loses} with it; add one"
            )
    played = [
        _played_once(kinds, fleet, tiers, days * _DAY_S, Random(seed * 7919 + number)) for number in range(rounds)
    ]
    names = [kind.name for kind in kinds]
    return PlayedRun(
        **{
            share: fmean(getattr(one, share) for one in played)
            for share in ("goodput", "saving", "lost", "down", "waiting")
        },
        interruptions={name: fmean(one.interruptions[name] for one in played) for name in names},
    )


def _outlasting(tiers: Sequence[CheckpointTier], loses: Loses) -> list[CheckpointTier]:
    return [tier for tier in tiers if _ORDER.index(tier.outlasts) >= _ORDER.index(loses)]


def _saving_share(tiers: Sequence[CheckpointTier]) -> float:
    """Of the time in which steps could go on, what checkpoints take."""
    stalled = sum(tier.stall_s / tier.interval_s for tier in tiers)
    return stalled / (1 + stalled)


def _gap_s(kind: InterruptionKind, num_nodes: int, rng: Random) -> float:
    """Seconds to the next interruption of a kind, of a Weibull law with the rate's mean. Those that follow in a burst are part of
    the rate."""
    mean_s = _DAY_S * 1000 / (num_nodes * kind.per_thousand_node_days) / (1 - kind.burst_share)
    return rng.weibullvariate(mean_s / gamma(1 + 1 / kind.shape), kind.shape)


def _played_once(
    kinds: Sequence[InterruptionKind], fleet: Fleet, tiers: Sequence[CheckpointTier], length_s: float, rng: Random
) -> PlayedRun:
    queue: list[tuple[float, int, bool]] = []  # when, which kind, whether it follows in a burst
    for index, kind in enumerate(kinds):
        if kind.per_thousand_node_days:
            heappush(queue, (_gap_s(kind, fleet.num_nodes, rng), index, False))
    share = 1 - _saving_share(tiers)
    counts = dict.fromkeys((kind.name for kind in kinds), 0)
    repaired: list[float] = []  # when nodes that are away come back
    saved = dict.fromkeys(range(len(tiers)), 0.0)  # work up to the newest checkpoint of each tier
    spares, now_s = fleet.num_spares, 0.0
    ready_s = wait_s = stopped_s = 0.0  # when all nodes are there, and what the last stop took of waiting and besides
    lost_s = down_s = waiting_s = work_s = 0.0
    while queue and queue[0][0] < length_s:
        at_s, index, follows = heappop(queue)
        kind = kinds[index]
        if rng.random() < kind.burst_share:
            heappush(queue, (at_s + rng.random() * kind.burst_s, index, True))
        if not follows:
            heappush(queue, (at_s + _gap_s(kind, fleet.num_nodes, rng), index, False))
        counts[kind.name] += 1
        while repaired and repaired[0] <= at_s:
            heappop(repaired)
            spares += 1
        if at_s > now_s:  # steps went on since the last restart, which began the intervals anew
            for number, tier in enumerate(tiers):
                done = max(0.0, at_s - now_s - tier.write_s) * share // tier.interval_s
                if done:
                    saved[number] = work_s + done * tier.interval_s
            work_s, now_s = work_s + (at_s - now_s) * share, at_s
        elif kind.loses == "nothing":
            continue  # it is down anyway
        else:  # the restart begins anew
            waited_s = min(wait_s, at_s - (now_s - stopped_s - wait_s))
            undone_s = now_s - at_s - (wait_s - waited_s)
            waiting_s, down_s, now_s = waiting_s - (wait_s - waited_s), down_s - undone_s, at_s
        outlasting = [number for number, tier in enumerate(tiers) if tier in _outlasting(tiers, kind.loses)]
        if kind.loses == "nothing":  # it saves first
            saved |= dict.fromkeys((number for number, tier in enumerate(tiers) if tier.outlasts == "job"), work_s)
        best = max(outlasting, key=lambda number: (saved[number], -tiers[number].restart_s))
        lost_s, work_s = lost_s + work_s - saved[best], saved[best]
        saved = {number: min(at, work_s) if number in outlasting else 0.0 for number, at in saved.items()}
        replace_s = 0.0
        if kind.loses == "node":
            heappush(repaired, at_s + kind.repair_s)
            replace_s = fleet.replace_s
            if spares:
                spares -= 1
            else:
                ready_s = max(ready_s, heappop(repaired))
        wait_s = max(0.0, ready_s - now_s)
        detect_s = 0.0 if kind.loses == "nothing" else fleet.detect_s
        stopped_s = detect_s + replace_s + tiers[best].restart_s
        down_s, waiting_s, now_s = down_s + stopped_s, waiting_s + wait_s, now_s + stopped_s + wait_s
    if now_s < length_s:
        work_s += (length_s - now_s) * share
        now_s = length_s
    total_s = now_s
    saving = max(0.0, total_s - work_s - lost_s - down_s - waiting_s)
    return PlayedRun(
        goodput=work_s / total_s,
        saving=saving / total_s,
        lost=lost_s / total_s,
        down=down_s / total_s,
        waiting=waiting_s / total_s,
        interruptions={name: float(count) for name, count in counts.items()},
    )


def usual_tiers(*, stall_s: float, restart_s: float, interval_s: float) -> tuple[CheckpointTier, ...]:
    """A file system alone, as most runs have it."""
    return (
        CheckpointTier(
            name="file system", interval_s=interval_s, stall_s=stall_s, write_s=0.0, restart_s=restart_s, outlasts="job"
        ),
    )


def surviving_tiers(*, step_s: float, stall_s: float, restart_s: float) -> tuple[CheckpointTier, ...]:
    """Tiers as `flatout survive` has them: memory of the same node and of another each few steps, and a file system in the
    background. Costs are assumed; a restart from memory took 6 s in the median on two H200 (bench/surviving.py)."""
    memory = CheckpointTier(
        name="memory of the same node", interval_s=10 * step_s, stall_s=0.1 * step_s, write_s=step_s, restart_s=15.0,
        outlasts="process",
    )  # fmt: skip
    files = CheckpointTier(
        name="file system", interval_s=1800.0, stall_s=max(0.5, stall_s / 20), write_s=stall_s, restart_s=restart_s,
        outlasts="job",
    )  # fmt: skip
    other = structs.replace(memory, name="memory of another node", outlasts="node", restart_s=30.0)
    return memory, other, files
