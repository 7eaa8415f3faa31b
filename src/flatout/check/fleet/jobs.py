"""Jobs from the records of their nodes and starts, with what each of them wastes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

from flatout.check.fleet.prices import PriceList, sum_of_hours, weighted_mean
from flatout.core import units
from flatout.core.records.fleet import FleetJob, Hours, Waste
from flatout.core.records.job import JobOutcome, JobRecord

LOST_S: Final = 15 * 60.0
"""A running job that has written nothing for so long has been killed without a word: heartbeats come every minute or so."""
_STALLED_S: Final = 10 * 60.0
_STALLED_STEPS: Final = 50.0
"""A job without a step for so long, and for so many steps' time, counts as stalled; saving and evaluation are shorter."""
_LONG_START_S: Final = 120.0
_LONG_START_FRACTION: Final = 0.1
"""A start that takes so long, and so much of a job, is named."""


def jobs_of(records: Iterable[JobRecord], *, now_s: float, prices: PriceList) -> list[FleetJob]:
    """One job for all records that share its name and workload, in the order of their beginnings."""
    parts: dict[tuple[str, str], list[JobRecord]] = defaultdict(list)
    for record in records:
        parts[record.job, record.workload].append(record)
    jobs = [_job_of(sorted(part, key=lambda r: (r.began_s, r.rank)), now_s, prices) for part in parts.values()]
    return sorted(jobs, key=lambda job: (job.began_s, job.job))


def worst_first(jobs: Iterable[FleetJob]) -> list[FleetJob]:
    """The jobs by the middle of what they waste: in money where that is known of all of them, else in GPU-hours."""
    jobs = list(jobs)
    costs = [job.wasted_cost for job in jobs]
    wasted = [cost for cost in costs if cost is not None]
    if len(wasted) < len(jobs):
        wasted = [(job.low.as_gpu_hours, job.high.as_gpu_hours) for job in jobs]
    return [job for _, job in sorted(zip(wasted, jobs, strict=True), key=lambda pair: -sum(pair[0]))]


def hours_of(record: JobRecord) -> Hours:
    """The hours of one node's part of one start."""
    return Hours(gpu=record.gpu_hours, core=record.core_hours)


def _job_of(records: Sequence[JobRecord], now_s: float, prices: PriceList) -> FleetJob:
    first, last = records[0], records[-1]
    leader = _latest_first_rank(records)
    hours = sum_of_hours(map(hours_of, records))
    outcome = _outcome(last, now_s)
    wastes = tuple(_wastes(records, leader, hours, outcome, now_s))
    low, high = _together(wastes, hours, leader)
    observed_s = sum(r.observing_s for r in records)
    seconds = sum(r.seconds for r in records)
    return FleetJob(
        job=first.job,
        workload=first.workload,
        name=leader.name,
        command=leader.command,
        project=leader.project,
        user=leader.user,
        team=leader.team,
        model=leader.model,
        device=leader.device,
        nodes=tuple(sorted({r.node for r in records})),
        num_gpus=max(sum(r.num_gpus for r in part) for part in _by_start(records)),
        num_cores=max(sum(r.num_cores for r in part) for part in _by_start(records)),
        world_size=leader.world_size,
        num_starts=len({r.restart for r in records}),
        began_s=first.began_s,
        written_s=max(r.written_s for r in records),
        outcome=outcome,
        error=last.error,
        hours=hours,
        cost=prices.cost(hours, leader.device),
        num_steps=sum(max(r.num_steps for r in part) for part in _by_start(records)),
        step_s=leader.step_s,
        utilisation=weighted_mean((r.utilisation, r.seconds) for r in records),
        mfu=leader.mfu,
        wastes=wastes,
        low=low,
        high=high,
        wasted_cost=prices.costs(low, high, leader.device),
        observing_fraction=observed_s / seconds if seconds > 0 else 0.0,
        not_looked=leader.not_looked,
    )


def _by_start(records: Sequence[JobRecord]) -> Iterator[list[JobRecord]]:
    for restart in sorted({r.restart for r in records}):
        yield [r for r in records if r.restart == restart]


def _latest_first_rank(records: Sequence[JobRecord]) -> JobRecord:
    """The record that says most: of the first rank, looked into, the latest."""
    return max(records, key=lambda r: (r.rank == 0, r.saved_fraction is not None, r.restart, r.written_s))


def _outcome(record: JobRecord, now_s: float) -> JobOutcome | Literal["lost"]:
    return "lost" if record.is_running and now_s - record.written_s > LOST_S else record.outcome


def _wastes(
    records: Sequence[JobRecord], leader: JobRecord, hours: Hours, outcome: str, now_s: float
) -> Iterator[Waste]:
    """What a job wastes, the causes in its steps first."""
    stepping = hours.times(_stepping_fraction(leader))
    for finding in leader.findings:
        low, high = finding.saved_fractions
        yield Waste(
            kind="cause",
            title=finding.title,
            because=finding.because,
            low=stepping.times(low),
            high=stepping.times(high),
            rule=finding.rule,
            file=finding.file,
            line=finding.line,
            edit=finding.edit,
            gain=finding.gain,
        )
    last = max(records, key=lambda r: r.written_s)
    if (idle_s := _stalled_s(last)) > 0:
        idle = Hours(
            gpu=sum(r.num_gpus for r in records if r.restart == last.restart) * idle_s / 3600,
            core=0.0 if last.num_gpus else last.num_cores * idle_s / 3600,
        )
        yield Waste(
            kind="stalled",
            title="It makes no steps" if outcome == "running" else "It made no steps at its end",
            because=f"no step for {units.long_duration(idle_s)} while it held its devices: a hang, or a long evaluation",
            low=Hours(),
            high=idle,
        )
    if leader.start_s > max(_LONG_START_S, _LONG_START_FRACTION * leader.seconds):
        start = hours.times(min(1.0, leader.start_s / leader.seconds)) if leader.seconds else Hours()
        yield Waste(
            kind="start",
            title="A long start",
            because=f"{units.long_duration(leader.start_s)} of {units.long_duration(leader.seconds)} passed before its first "
            "steps",
            low=Hours(),
            high=start,
        )
    if outcome in ("failed", "lost"):
        error = last.error or "it wrote nothing more and did not end by itself"
        yield Waste(
            kind="failed",
            title="It failed" if outcome == "failed" else "It was killed",
            because=f"{error}; what it had not saved is lost",
            low=Hours(),
            high=hours,
        )


def _stepping_fraction(record: JobRecord) -> float:
    """The share of a start's time in which it made steps."""
    if record.step_s is None or record.seconds <= 0:
        return 0.0
    return min(1.0, record.num_steps * record.step_s / record.seconds)


def _stalled_s(record: JobRecord) -> float:
    if record.last_step_s is None or record.step_s is None:
        return 0.0
    idle_s = record.written_s - record.last_step_s
    return idle_s if idle_s > max(_STALLED_S, _STALLED_STEPS * record.step_s) else 0.0


def _together(wastes: Sequence[Waste], hours: Hours, leader: JobRecord) -> tuple[Hours, Hours]:
    """What the wastes are together. Causes of one step overlap: what the diagnosis says of all of them counts.

    The hours of a failed job are not added to its waste: how much of them a checkpoint has saved is not known.
    """
    causes = [w for w in wastes if w.kind == "cause"]
    low = max((w.low for w in causes), key=lambda h: h.as_gpu_hours, default=Hours())
    high = max((w.high for w in causes), key=lambda h: h.as_gpu_hours, default=Hours())
    together = hours.times(_stepping_fraction(leader) * (leader.saved_fraction or 0.0))
    if together.as_gpu_hours > high.as_gpu_hours:
        high = together
    others = sum_of_hours(w.high for w in wastes if w.kind in ("stalled", "start"))
    return _at_most(low, hours), _at_most(high + others, hours)


def _at_most(part: Hours, whole: Hours) -> Hours:
    return Hours(gpu=min(part.gpu, whole.gpu), core=min(part.core, whole.core))
