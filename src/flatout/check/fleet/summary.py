"""The whole fleet between two times, from its records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from flatout.check.fleet.jobs import hours_of, jobs_of, worst_first
from flatout.check.fleet.nodes import sick_nodes_of
from flatout.check.fleet.prices import NO_PRICES, PriceList, sum_of_hours, summed, summed_range, weighted_mean
from flatout.check.fleet.regressions import regressions_of
from flatout.core.records.fleet import CauseUse, FleetJob, FleetSummary, Grouping, GroupUse, Hours
from flatout.core.records.job import JobRecord

_NAMES: Final[dict[Grouping, Callable[[FleetJob], str]]] = {
    "team": lambda job: job.team,
    "model": lambda job: job.model or job.name,
    "user": lambda job: job.user,
}


def summary_of(
    records: Iterable[JobRecord],
    *,
    since_s: float,
    until_s: float,
    prices: PriceList = NO_PRICES,
    notes: Sequence[str] = (),
) -> FleetSummary:
    """What the jobs that were alive between two Unix times say together; older ones tell who has become slower since."""
    known = [r for r in records if r.began_s < until_s]
    present = [r for r in known if r.written_s >= since_s]
    jobs = worst_first(jobs_of(present, now_s=until_s, prices=prices))
    observed = weighted_mean((r.observing_s / r.seconds if r.seconds > 0 else None, r.seconds) for r in present)
    return FleetSummary(
        since_s=since_s,
        until_s=until_s,
        currency=prices.currency,
        num_jobs=len(jobs),
        num_running=sum(job.outcome == "running" for job in jobs),
        num_looked=sum(not job.not_looked for job in jobs),
        hours=sum_of_hours(job.hours for job in jobs),
        cost=summed(job.cost for job in jobs),
        low=sum_of_hours(job.low for job in jobs),
        high=sum_of_hours(job.high for job in jobs),
        wasted_cost=summed_range(job.wasted_cost for job in jobs),
        utilisation=_mean_over_time(jobs, lambda job: job.utilisation),
        mfu=_mean_over_time(jobs, lambda job: job.mfu),
        jobs=tuple(jobs),
        causes=tuple(_causes(jobs, prices)),
        groups={name: tuple(_groups(jobs, of)) for name, of in _NAMES.items()} | {"node": tuple(_nodes(present, jobs))},
        regressions=tuple(regressions_of(known, since_s=since_s)),
        sick_nodes=tuple(sick_nodes_of(present)),
        observing_fraction=observed or 0.0,
        notes=tuple(notes),
    )


def _mean_over_time(jobs: Iterable[FleetJob], of: Callable[[FleetJob], float | None]) -> float | None:
    return weighted_mean((of(job), job.hours.as_gpu_hours) for job in jobs)


def _groups(jobs: Iterable[FleetJob], name_of: Callable[[FleetJob], str]) -> list[GroupUse]:
    by_name: dict[str, list[FleetJob]] = defaultdict(list)
    for job in jobs:
        by_name[name_of(job) or "-"].append(job)
    return sorted((_group(name, own) for name, own in by_name.items()), key=_group_badness)


def _group(name: str, jobs: Sequence[FleetJob]) -> GroupUse:
    return GroupUse(
        name=name,
        num_jobs=len(jobs),
        hours=sum_of_hours(job.hours for job in jobs),
        cost=summed(job.cost for job in jobs),
        utilisation=_mean_over_time(jobs, lambda job: job.utilisation),
        mfu=_mean_over_time(jobs, lambda job: job.mfu),
        low=sum_of_hours(job.low for job in jobs),
        high=sum_of_hours(job.high for job in jobs),
        failed=sum_of_hours(job.hours for job in jobs if job.outcome in ("failed", "lost")),
    )


def _group_badness(group: GroupUse) -> tuple[float, str]:
    return -(group.low.as_gpu_hours + group.high.as_gpu_hours), group.name


def _nodes(records: Iterable[JobRecord], jobs: Iterable[FleetJob]) -> list[GroupUse]:
    """The nodes' own shares of jobs: of one on several nodes each has its part of the waste."""
    known = {(job.job, job.workload): job for job in jobs}
    by_node: dict[str, list[JobRecord]] = defaultdict(list)
    for record in records:
        by_node[record.node].append(record)
    return sorted((_node(name, own, known) for name, own in by_node.items()), key=_group_badness)


def _node(name: str, records: Sequence[JobRecord], known: dict[tuple[str, str], FleetJob]) -> GroupUse:
    pairs = [(record, known[record.job, record.workload]) for record in records]
    parts = [_part(hours_of(record), job.hours) for record, job in pairs]
    return GroupUse(
        name=name,
        num_jobs=len({(job.job, job.workload) for _, job in pairs}),
        hours=sum_of_hours(map(hours_of, records)),
        cost=summed(
            job.cost * part if job.cost is not None else None for (_, job), part in zip(pairs, parts, strict=True)
        ),
        utilisation=weighted_mean((r.utilisation, hours_of(r).as_gpu_hours) for r in records),
        mfu=weighted_mean((job.mfu, hours_of(record).as_gpu_hours) for record, job in pairs),
        low=sum_of_hours(job.low.times(part) for (_, job), part in zip(pairs, parts, strict=True)),
        high=sum_of_hours(job.high.times(part) for (_, job), part in zip(pairs, parts, strict=True)),
        failed=sum_of_hours(hours_of(record) for record, job in pairs if job.outcome in ("failed", "lost")),
    )


def _part(hours: Hours, whole: Hours) -> float:
    return hours.as_gpu_hours / whole.as_gpu_hours if whole.as_gpu_hours > 0 else 0.0


def _causes(jobs: Iterable[FleetJob], prices: PriceList) -> list[CauseUse]:
    """Causes over all jobs, what mending them saves first. Those of one job overlap, so that these do not add up."""
    found: dict[str, list[tuple[FleetJob, int]]] = defaultdict(list)
    for job in jobs:
        costliest: dict[str, int] = {}
        for index, waste in enumerate(job.wastes):
            key = waste.rule or waste.kind
            if key not in costliest or waste.high.as_gpu_hours > job.wastes[costliest[key]].high.as_gpu_hours:
                costliest[key] = index
        for key, index in costliest.items():
            found[key].append((job, index))
    causes = [_cause(key, own, prices) for key, own in found.items()]
    return sorted(causes, key=lambda c: (-(c.low.as_gpu_hours + c.high.as_gpu_hours), c.rule))


def _cause(key: str, own: Sequence[tuple[FleetJob, int]], prices: PriceList) -> CauseUse:
    wastes = [(job, job.wastes[index]) for job, index in own]
    worst, first = max(wastes, key=lambda pair: pair[1].high.as_gpu_hours)
    return CauseUse(
        rule=key,
        title=first.title,
        num_jobs=len(wastes),
        low=sum_of_hours(w.low for _, w in wastes),
        high=sum_of_hours(w.high for _, w in wastes),
        wasted_cost=summed_range(prices.costs(w.low, w.high, job.device) for job, w in wastes),
        worst_job=worst.job,
    )
