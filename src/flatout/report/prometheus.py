"""A fleet's figures in Prometheus' text format: gauges over the summary's time, and the running jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from flatout.core.records.fleet import FleetJob, FleetSummary, GroupUse

if TYPE_CHECKING:
    from prometheus_client import Metric

_MOST_JOBS: Final = 1000
"""Running jobs that have series of their own: each series costs the scraper some kilobytes."""


def prometheus_text(summary: FleetSummary) -> bytes:
    """The exposition that a scrape of `/metrics` gets (text format 0.0.4, UTF-8)."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(summary))
    return generate_latest(registry)


class _Figures:
    def __init__(self, summary: FleetSummary) -> None:
        self._summary = summary

    def collect(self) -> Iterator[Metric]:
        summary = self._summary
        yield _gauge(
            "flatout_window_seconds", "Time that all figures are over", [((), summary.until_s - summary.since_s)]
        )
        yield _gauge("flatout_jobs", "Jobs by outcome", _outcomes(summary.jobs), ("outcome",))
        ratio = [((), summary.observing_fraction)]
        yield _gauge("flatout_observing_ratio", "Share of the jobs' time that watching took", ratio)
        yield _gauge(
            "flatout_regressions", "Workloads whose steps take longer", [((), float(len(summary.regressions)))]
        )
        for by, groups in summary.groups.items():
            yield from _group_gauges(by, groups)
        yield _gauge(
            "flatout_cause_wasted_gpu_hours",
            "GPU-hours that mending a cause in all jobs would save",
            [((c.rule, bound), h.gpu) for c in summary.causes for bound, h in (("low", c.low), ("high", c.high))],
            ("rule", "bound"),
        )
        yield _gauge(
            "flatout_cause_jobs",
            "Jobs with a cause",
            [((c.rule,), float(c.num_jobs)) for c in summary.causes],
            ("rule",),
        )
        sick = {node.node for node in summary.sick_nodes}
        nodes = [((group.name,), float(group.name in sick)) for group in summary.groups["node"]]
        yield _gauge("flatout_node_sick", "1 for a node to look at", nodes, ("node",))
        running = [job for job in summary.jobs if job.outcome == "running"][:_MOST_JOBS]
        yield from _job_gauges(running)


def _outcomes(jobs: Iterable[FleetJob]) -> list[tuple[tuple[str, ...], float]]:
    counts = dict.fromkeys(("running", "finished", "failed", "ended", "lost"), 0)
    for job in jobs:
        counts[job.outcome] += 1
    return [((name,), float(number)) for name, number in counts.items()]


def _group_gauges(by: str, groups: Iterable[GroupUse]) -> Iterator[Metric]:
    groups = tuple(groups)
    named = (
        ("jobs", "Jobs", [((g.name,), float(g.num_jobs)) for g in groups]),
        ("gpu_hours", "GPU-hours used", [((g.name,), g.hours.gpu) for g in groups]),
        ("core_hours", "Core-hours used by jobs without GPUs", [((g.name,), g.hours.core) for g in groups]),
        ("failed_gpu_hours", "GPU-hours of jobs that failed", [((g.name,), g.failed.gpu) for g in groups]),
        (
            "utilisation_ratio",
            "Share of the time in which devices had work",
            [((g.name,), g.utilisation) for g in groups if g.utilisation is not None],
        ),
        (
            "mfu_ratio",
            "FLOP a second over the data sheet's rate",
            [((g.name,), g.mfu) for g in groups if g.mfu is not None],
        ),
    )
    for name, meaning, values in named:
        yield _gauge(f"flatout_{by}_{name}", f"{meaning}, by {by}", values, (by,))
    bounds = [((g.name, bound), hours) for g in groups for bound, hours in (("low", g.low), ("high", g.high))]
    for kind, name in (("gpu", "GPU-hours"), ("core", "Core-hours")):
        wasted = [(labels, getattr(hours, kind)) for labels, hours in bounds]
        yield _gauge(
            f"flatout_{by}_wasted_{kind}_hours", f"{name} that need not be spent, by {by}", wasted, (by, "bound")
        )


def _job_gauges(jobs: Iterable[FleetJob]) -> Iterator[Metric]:
    jobs = tuple(jobs)
    named = (
        ("step_seconds", "Median seconds of a step", [(_labels(j), j.step_s) for j in jobs if j.step_s is not None]),
        ("gpus", "GPUs of a running job", [(_labels(j), float(j.num_gpus)) for j in jobs]),
        ("wasted_gpu_hours", "GPU-hours wasted so far, at most", [(_labels(j), j.high.gpu) for j in jobs]),
        (
            "utilisation_ratio",
            "Share of the time in which devices had work",
            [(_labels(j), j.utilisation) for j in jobs if j.utilisation is not None],
        ),
    )
    for name, meaning, values in named:
        yield _gauge(f"flatout_job_{name}", meaning, values, ("job", "name", "team", "user"))


def _labels(job: FleetJob) -> tuple[str, ...]:
    return (f"{job.job}-{job.workload}", job.name, job.team, job.user)


def _gauge(
    name: str, meaning: str, values: Iterable[tuple[tuple[str, ...], float]], labels: tuple[str, ...] = ()
) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(name, meaning, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
