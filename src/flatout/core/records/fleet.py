"""What the jobs of a fleet say together: what is wasted and why, who became slower, which nodes are sick."""

from __future__ import annotations

from typing import Final, Literal

from flatout.core.records.job import JobOutcome
from flatout.core.records.record import Record

CORES_OF_A_GPU: Final = 64.0
"""Core-hours that count like a GPU-hour where no prices say so: clouds ask 2 to 4 $ for an hour of an H100 and 0.04 to 0.05 $ for
one of a core (list prices of 2025 and 2026)."""

Grouping = Literal["team", "model", "node", "user"]


class Hours(Record, frozen=True, kw_only=True):
    """GPU-hours, and core-hours of jobs without GPUs."""

    gpu: float = 0.0
    core: float = 0.0

    def __add__(self, other: Hours) -> Hours:
        return Hours(gpu=self.gpu + other.gpu, core=self.core + other.core)

    def times(self, factor: float) -> Hours:
        """The same share of both."""
        return Hours(gpu=self.gpu * factor, core=self.core * factor)

    @property
    def as_gpu_hours(self) -> float:
        """One number to order by: core-hours count as `CORES_OF_A_GPU` says."""
        return self.gpu + self.core / CORES_OF_A_GPU


class Waste(Record, frozen=True, kw_only=True):
    """Time of a job that need not be spent, `low` to `high` hours; with rule and line where it is a cause in its steps."""

    kind: Literal["cause", "stalled", "start", "failed"]
    title: str
    because: str
    low: Hours
    high: Hours
    rule: str = ""
    file: str = ""
    line: int = 0
    edit: str = ""
    gain: tuple[float, float] = (1.0, 1.0)


class FleetJob(Record, frozen=True, kw_only=True):
    """A job with all its nodes and restarts. `low` to `high` is what its wastes are together, which is less than their sum.

    `outcome` 'lost': it was running when its last record was written, which is long ago. Costs are None without prices.
    """

    job: str
    workload: str
    name: str
    command: str
    project: str
    user: str
    team: str
    model: str
    device: str
    nodes: tuple[str, ...]
    num_gpus: int
    num_cores: int
    world_size: int
    num_starts: int
    began_s: float
    written_s: float
    outcome: JobOutcome | Literal["lost"]
    error: str
    hours: Hours
    cost: float | None
    num_steps: int
    step_s: float | None
    utilisation: float | None
    mfu: float | None
    wastes: tuple[Waste, ...]
    low: Hours
    high: Hours
    wasted_cost: tuple[float, float] | None
    observing_fraction: float
    not_looked: str


class GroupUse(Record, frozen=True, kw_only=True):
    """The jobs of a team, of a model, of a node or of a user. Utilisation and MFU are means weighted by time; None where no job
    has them."""

    name: str
    num_jobs: int
    hours: Hours
    cost: float | None
    utilisation: float | None
    mfu: float | None
    low: Hours
    high: Hours
    failed: Hours
    """Hours of jobs that failed."""


class CauseUse(Record, frozen=True, kw_only=True):
    """One cause over all jobs that have it: what mending it everywhere would save."""

    rule: str
    title: str
    num_jobs: int
    low: Hours
    high: Hours
    wasted_cost: tuple[float, float] | None
    worst_job: str


class Regression(Record, frozen=True, kw_only=True):
    """A workload whose steps take longer than they did: medians before and now, and the least ratio that both intervals allow."""

    workload: str
    name: str
    team: str
    job: str
    """The first of its slower jobs."""
    num_before: int
    num_now: int
    before_s: float
    now_s: float
    least_ratio: float
    hours: Hours
    """What the longer steps have taken more."""
    changed: tuple[str, ...]
    """What differs between the last job before and the first slower one."""


class SickNode(Record, frozen=True, kw_only=True):
    """A node on which jobs are slower, fail more often, or whose sensors complain."""

    node: str
    num_jobs: int
    because: tuple[str, ...]
    slowdown: float | None = None
    """Median over its jobs of a step's time over that of the same workload on other nodes."""
    hours: Hours = Hours()
    """Hours of the jobs that ran there."""


class FleetSummary(Record, frozen=True, kw_only=True):
    """The fleet between two Unix times. Jobs, causes and groups are in the order of what they waste, the worst first."""

    since_s: float
    until_s: float
    currency: str
    num_jobs: int
    num_running: int
    num_looked: int
    hours: Hours
    cost: float | None
    low: Hours
    high: Hours
    wasted_cost: tuple[float, float] | None
    utilisation: float | None
    mfu: float | None
    jobs: tuple[FleetJob, ...]
    causes: tuple[CauseUse, ...]
    groups: dict[Grouping, tuple[GroupUse, ...]]
    regressions: tuple[Regression, ...]
    sick_nodes: tuple[SickNode, ...]
    observing_fraction: float
    """What watching took of the jobs' time, on average over it."""
    notes: tuple[str, ...] = ()
