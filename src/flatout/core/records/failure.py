"""A run that is interrupted: how often, what each interruption and each checkpoint costs, and what is left of the time."""

from __future__ import annotations

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
