"""Nodes that are sick: slower than others for the same work, failing more jobs, or with sensors that complain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import comb
from statistics import median
from typing import Final

from flatout.check.fleet.prices import sum_of_hours
from flatout.core import units
from flatout.core.records.fleet import Hours, SickNode
from flatout.core.records.job import JobRecord

_SLOWER: Final = 1.1
"""A node is slow from here on: nodes of one kind differ by a few per cent."""
_FEWEST: Final = 3
"""Failures."""
_SIGNIFICANT: Final = 0.05
"""Most probability that the jobs of a healthy node agree so; five of five do."""
_CHANCE: Final = 0.01
"""Most probability, over all nodes, that so many failures fall on one by chance."""
_THROTTLED: Final = 0.05


def sick_nodes_of(records: Iterable[JobRecord]) -> list[SickNode]:
    """Nodes with a reason to look at them, the one with the most hours first."""
    rows = list(records)
    by_node: dict[str, list[JobRecord]] = defaultdict(list)
    for row in rows:
        by_node[row.node].append(row)
    ratios = _ratios(rows)
    found: list[SickNode] = []
    for node, own in by_node.items():
        slowdown = _slowdown(ratios[node])
        because = tuple(_complaints(own, rows, ratios[node], slowdown, _CHANCE / len(by_node)))
        if because:
            hours = sum_of_hours(Hours(gpu=r.gpu_hours, core=r.core_hours) for r in own)
            found.append(
                SickNode(node=node, num_jobs=len(own), because=because, slowdown=slowdown, hours=hours),
            )
    return sorted(found, key=lambda n: (-n.hours.as_gpu_hours, n.node))


def _complaints(
    own: Sequence[JobRecord],
    rows: Sequence[JobRecord],
    ratios: Sequence[float],
    slowdown: float | None,
    chance: float,
) -> Iterator[str]:
    if slowdown is not None:
        yield (
            f"steps take {slowdown:.2f} times as long as those of the same workloads on other nodes, "
            f"in {sum(r > 1 for r in ratios)} of {len(ratios)} jobs"
        )
    num_failed, num_all_failed = (sum(r.outcome == "failed" for r in some) for some in (own, rows))
    if num_failed >= _FEWEST and _chance_of_failures(num_failed, len(own), num_all_failed, len(rows)) < chance:
        others = (num_all_failed - num_failed) / max(1, len(rows) - len(own))
        yield f"{num_failed} of {len(own)} jobs failed there, {units.percent(others)} elsewhere"
    throttled = [r.health.throttled_fraction for r in own if r.health.throttled_fraction is not None]
    if throttled and max(throttled) >= _THROTTLED:
        worst = max(own, key=lambda r: r.health.throttled_fraction or 0.0).health
        yield f"a GPU was slowed down in {units.percent(worst.throttled_fraction)} of samples: {worst.throttled_because}"
    if errors := max((r.health.ecc_errors or 0 for r in own), default=0):
        yield f"{units.counted(errors, 'memory error')} that could not be corrected"


def _ratios(rows: Sequence[JobRecord]) -> dict[str, list[float]]:
    """Steps of each node's jobs over the median of the same workload on other nodes.

    Jobs on one node alone count: of several, all wait for the slowest.
    """
    by_workload: dict[str, list[JobRecord]] = defaultdict(list)
    for row in rows:
        if row.step_s and row.world_size == row.local_world_size:
            by_workload[row.workload].append(row)
    found: dict[str, list[float]] = defaultdict(list)
    for alike in by_workload.values():
        times: dict[str, list[float]] = defaultdict(list)
        for row in alike:
            times[row.node].append(row.step_s or 0.0)
        for node, own in times.items():
            others = [median(t) for other, t in times.items() if other != node]
            if others:
                found[node] += [time / median(others) for time in own]
    return found


def _slowdown(ratios: Sequence[float]) -> float | None:
    """The median ratio where it is large and most jobs agree: by the sign test, on a healthy node half of them would."""
    if not ratios or median(ratios) < _SLOWER:
        return None
    slower, number = sum(r > 1.0 for r in ratios), len(ratios)
    probability = sum(comb(number, k) for k in range(slower, number + 1)) / 2**number
    return median(ratios) if probability < _SIGNIFICANT else None


def _chance_of_failures(failed: int, jobs: int, all_failed: int, all_jobs: int) -> float:
    """The probability of so many failures or more among `jobs`, were all failures spread by chance (hypergeometric).

    >>> round(_chance_of_failures(3, 3, 3, 10), 4)
    0.0083
    """
    most = min(jobs, all_failed)
    num_alike = sum(comb(all_failed, k) * comb(all_jobs - all_failed, jobs - k) for k in range(failed, most + 1))
    return num_alike / comb(all_jobs, jobs)
