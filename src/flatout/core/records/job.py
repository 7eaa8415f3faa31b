"""A training job of a fleet: what ran where for how long, how fast, and what made it slow."""

from __future__ import annotations

from typing import Literal

from flatout.core.records.finding import Basis, Regime
from flatout.core.records.record import Record

JobOutcome = Literal["running", "finished", "failed", "ended"]
"""'ended': by a signal or a scheduler, which is no fault of the job's."""


class JobFinding(Record, frozen=True, kw_only=True):
    """A cause that makes a job's steps slow, as `flatout check` reports it: `share` of a step, `gain` of the whole step."""

    rule: str
    title: str
    file: str
    line: int
    regime: Regime
    share: float
    gain: tuple[float, float]
    because: str
    edit: str
    basis: Basis = "estimate"

    @property
    def saved_fractions(self) -> tuple[float, float]:
        """The share of the steps' time that a cure would save, low and high.

        >>> JobFinding(
        ...     rule="", title="", file="", line=1, regime="input", share=0.5, gain=(1.0, 2.0), because="", edit=""
        ... ).saved_fractions
        (0.0, 0.5)
        """
        low, high = (1.0 - 1.0 / max(1.0, gain) for gain in self.gain)
        return low, high


class NodeHealth(Record, frozen=True, kw_only=True):
    """What a node's sensors and its other load say while a job runs on it; None where that is not known.

    `throttled_fraction` is the share of the samples in which the driver slowed a GPU down for its heat or its power supply,
    `ecc_errors` memory errors that could not be corrected, `other_cores` cores that other processes used, `stolen_cores` those
    that the host of a virtual machine took.
    """

    num_samples: int = 0
    throttled_fraction: float | None = None
    throttled_because: str = ""
    hottest_c: float | None = None
    ecc_errors: int | None = None
    other_cores: float | None = None
    stolen_cores: float | None = None


class JobRecord(Record, frozen=True, kw_only=True):
    """One start of a training job on one node, written by that node's first rank and again at each heartbeat.

    `id` is that of this process, `job` is shared by the nodes and the restarts of a job. `began_s` and `written_s` are Unix
    times. Causes, model and FLOP are those of the job's first rank.
    """

    id: str
    job: str
    revision: int = 0
    """How often the record was written; of two with one id the higher counts."""
    began_s: float
    written_s: float
    outcome: JobOutcome = "running"
    error: str = ""

    name: str
    workload: str
    """Equal for jobs that do the same: script, arguments, device and number of ranks."""
    command: str = ""
    project: str = ""
    code_revision: str = ""
    user: str = ""
    team: str = ""
    partition: str = ""

    node: str
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    restart: int = 0
    start_s: float = 0.0
    """Seconds from the process until its first steps: imports, data, compiling."""
    device: str = "cpu"
    num_gpus: int = 0
    """GPUs that the job has on this node."""
    num_cores: int = 1
    python: str = ""
    torch: str = ""
    flatout: str = ""

    num_steps: int = 0
    num_timed: int = 0
    step_s: float | None = None
    """Median seconds of a step, `low_s` to `high_s` its 95 % interval; None before enough are timed."""
    low_s: float | None = None
    high_s: float | None = None
    last_step_s: float | None = None
    """Unix time of the last step."""
    utilisation: float | None = None
    """Share of the time in which the GPUs had work, or of its cores that a job without GPUs used."""
    memory_bytes: int | None = None
    """Most GPU memory that the first rank of the node held at once; of a job without GPUs its resident memory."""
    health: NodeHealth = NodeHealth()

    model: str = ""
    num_parameters: int = 0
    flop_per_step: float | None = None
    """FLOP of one rank's step; None where nobody has looked."""
    mfu: float | None = None
    """Model FLOP a second over the data sheet's rate in the dtype of most of them; None where there is no data sheet."""
    phases: dict[str, float] = {}
    """Share of a step by phase."""
    findings: tuple[JobFinding, ...] = ()
    saved_fraction: float | None = None
    """The share of a step that the cures of all findings would save together; None where nobody has looked."""
    not_looked: str = ""
    """Why the steps were not looked into, '' where they were."""
    observing_s: float = 0.0
    """What watching has taken of the job's time so far."""

    @property
    def seconds(self) -> float:
        """Wall time from the start to the last writing."""
        return max(0.0, self.written_s - self.began_s)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of this node's part."""
        return self.seconds * self.num_gpus / 3600.0

    @property
    def core_hours(self) -> float:
        """Core-hours of a part without GPUs; 0 with them."""
        return 0.0 if self.num_gpus else self.seconds * self.num_cores / 3600.0

    @property
    def is_running(self) -> bool:
        """Whether it had not ended when the record was written."""
        return self.outcome == "running"
