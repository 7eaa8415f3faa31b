"""A run that is interrupted: how often, what each interruption and each checkpoint costs, and what is left of the time."""

from __future__ import annotations

from typing import Literal

from flatout.core.errors import PlanError
from flatout.core.records.record import Record


class Failures(Record, frozen=True, kw_only=True):
    """How often a job is interrupted: `per_thousand_node_days` interruptions of the whole job that 1000 nodes cause in a day."""

    num_nodes: int
    per_thousand_node_days: float

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or not self.per_thousand_node_days > 0:
            raise PlanError(
                f"{self.num_nodes} nodes with {self.per_thousand_node_days} failures per 1000 node-days; give positive numbers"
            )

    @property
    def mtbf_s(self) -> float:
        """Seconds between interruptions in the mean."""
        return 86400.0 * 1000 / (self.num_nodes * self.per_thousand_node_days)


class Recovery(Record, frozen=True, kw_only=True):
    """What a run does about failures, in seconds.

    `stall_s` a checkpoint stops the steps; `write_s` it is on its way after that, and until then the one before it counts.
    `detect_s` until a failure is noticed (a hang takes longer than a crash), `restart_s` from then until steps go on.
    `interval_s` of work between checkpoints; None takes the best.
    """

    stall_s: float
    restart_s: float
    detect_s: float = 0.0
    write_s: float = 0.0
    interval_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("stall_s", "restart_s", "detect_s", "write_s"):
            if not getattr(self, name) >= 0:
                raise PlanError(f"{name} is {getattr(self, name)}; give 0 or more")
        if self.interval_s is not None and not self.interval_s > 0:
            raise PlanError(f"interval_s is {self.interval_s}; give a positive number")


class Goodput(Record, frozen=True, kw_only=True):
    """The share of the time that is work that counts, and where the rest goes; shares add up to 1."""

    goodput: float
    saving: float
    lost: float
    down: float
    interval_s: float
    mtbf_s: float


Loses = Literal["nothing", "process", "node", "job"]
"""What an interruption takes with it: nothing, as a planned stop that saves first; the memory of a process; of a whole node; or
of all nodes, as a failing switch or a power cut does.
"""


class InterruptionKind(Record, frozen=True, kw_only=True):
    """Interruptions of one kind: `per_thousand_node_days` of the job that 1000 nodes cause in a day.

    Times between them follow a Weibull law of this `shape`: 1 is chance alone, below 1 they come in clusters. After each, another
    of the same kind follows within `burst_s` with the chance `burst_share`. `repair_s` a lost node is away.
    """

    name: str
    per_thousand_node_days: float
    loses: Loses
    shape: float = 1.0
    burst_share: float = 0.0
    burst_s: float = 3600.0
    repair_s: float = 86400.0
    source: str = ""

    def __post_init__(self) -> None:
        if not self.per_thousand_node_days >= 0 or not self.shape > 0 or not 0 <= self.burst_share < 1:
            raise PlanError(
                f"'{self.name}': per_thousand_node_days {self.per_thousand_node_days} is 0 or more, shape {self.shape} positive, "
                f"and burst_share {self.burst_share} at least 0 and below 1"
            )


class CheckpointTier(Record, frozen=True, kw_only=True):
    """A place for checkpoints: how often, what each costs, and what it outlasts ('process': memory of the same node; 'node': of
    another node; 'job': a file system)."""

    name: str
    interval_s: float
    stall_s: float
    write_s: float
    restart_s: float
    outlasts: Loses

    def __post_init__(self) -> None:
        if not self.interval_s > 0 or min(self.stall_s, self.write_s, self.restart_s) < 0:
            raise PlanError(f"tier '{self.name}': interval_s is positive, stall_s, write_s and restart_s are 0 or more")


class Fleet(Record, frozen=True, kw_only=True):
    """Nodes of a job, spare ones beside it, and the seconds until a failure is noticed and a spare node is in its place."""

    num_nodes: int
    num_spares: int = 0
    detect_s: float = 0.0
    replace_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.num_spares < 0 or min(self.detect_s, self.replace_s) < 0:
            raise PlanError("num_nodes is positive; num_spares, detect_s and replace_s are 0 or more")


class PlayedRun(Record, frozen=True, kw_only=True):
    """A run that was played: shares of its time, how many interruptions of each kind came, and how long the job waited for
    nodes.
    """

    goodput: float
    saving: float
    lost: float
    down: float
    waiting: float
    interruptions: dict[str, float]
