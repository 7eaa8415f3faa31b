"""Workloads whose steps take longer than they did before."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Final

from flatout.core.records.fleet import Hours, Regression
from flatout.core.records.job import JobRecord

LEAST_RATIO: Final = 1.05
"""A step that takes so many times as long counts as longer; `flatout compare --fail-if-slower` has the same usual value."""
_COMPARED: Final = (
    ("code_revision", "code"),
    ("torch", "torch"),
    ("python", "python"),
    ("flatout", "flatout"),
    ("node", "node"),
    ("num_cores", "cores"),
)
"""Fields whose change may explain a longer step, and what they are called."""


def regressions_of(records: Iterable[JobRecord], *, since_s: float) -> list[Regression]:
    """Workloads that ran both before and since a Unix time, and are slower since then, the costliest first.

    A step is longer where the interval of now lies above that of before by 5 % or more: over several jobs, from the fastest
    to the slowest quarter of their medians; of one job alone, its own interval.
    """
    by_workload: dict[str, list[JobRecord]] = defaultdict(list)
    for record in records:
        if record.rank == 0 and record.step_s is not None:
            by_workload[record.workload].append(record)
    found = [r for rows in by_workload.values() if (r := _regression(rows, since_s)) is not None]
    return sorted(found, key=lambda r: -r.hours.as_gpu_hours)


def _regression(records: Sequence[JobRecord], since_s: float) -> Regression | None:
    ordered = sorted(records, key=lambda r: r.began_s)
    before = [r for r in ordered if r.began_s < since_s]
    now = [r for r in ordered if r.began_s >= since_s]
    if not before or not now:
        return None
    usual, _, high = _interval(before)
    present, now_low, _ = _interval(now)
    least = now_low / high if high > 0 else 1.0
    if least < LEAST_RATIO:
        return None
    slower = [r for r in now if (r.step_s or 0.0) > high]
    first = slower[0] if slower else now[0]
    more = 1.0 - usual / present
    return Regression(
        workload=first.workload,
        name=first.name,
        team=first.team,
        job=first.job,
        num_before=len(before),
        num_now=len(now),
        before_s=usual,
        now_s=present,
        least_ratio=least,
        hours=Hours(gpu=sum(r.gpu_hours for r in slower) * more, core=sum(r.core_hours for r in slower) * more),
        changed=tuple(_changes(before[-1], first)),
    )


def _interval(records: Sequence[JobRecord]) -> tuple[float, float, float]:
    """The usual step of some jobs and its interval."""
    times = sorted(r.step_s for r in records if r.step_s is not None)
    if len(times) >= 4:
        return median(times), times[len(times) // 4], times[-1 - len(times) // 4]
    lows = [r.low_s if r.low_s is not None else r.step_s or 0.0 for r in records]
    highs = [r.high_s if r.high_s is not None else r.step_s or 0.0 for r in records]
    return median(times), min(lows), max(highs)


def _changes(before: JobRecord, after: JobRecord) -> Iterable[str]:
    for field, name in _COMPARED:
        one, two = getattr(before, field), getattr(after, field)
        if one != two and one and two:
            yield f"{name} {one} -> {two}"
    earlier = {finding.rule for finding in before.findings}
    for finding in after.findings:
        if finding.rule not in earlier and before.saved_fraction is not None:
            yield f"new cause: {finding.title} ({finding.file}:{finding.line})"
