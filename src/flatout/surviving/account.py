"""What happened to a supervised job: its failures, what each cost, and how it ended."""

from __future__ import annotations

from statistics import median
from typing import Literal

from flatout.records.record import Record

Kind = Literal["signal", "exception", "hang", "node", "store"]


class Failure(Record, frozen=True, kw_only=True):
    """One failure. `rank` is the one that failed first, -1 where none did; `text` says how.

    `recovery_s` from the failure until every rank has done a step again, `steps_lost` of the steps that any rank had given to
    `keep`; both None where the job did not get that far.
    """

    epoch: int
    rank: int
    node: int
    slot: int
    kind: Kind
    text: str
    at_s: float
    """Since the job began."""
    reached: int
    """The newest step that any rank had given to `keep`; -1 before the first."""
    recovery_s: float | None = None
    resumed: int | None = None

    @property
    def steps_lost(self) -> int | None:
        """Steps that were done and are done again."""
        if self.resumed is None or self.resumed < 0 or self.reached < 0:
            return None
        return max(0, self.reached - self.resumed)


class Account(Record, frozen=True, kw_only=True):
    """The whole of a supervised job. `why` is told where the job was given up or stopped."""

    outcome: Literal["finished", "gave up", "stopped"]
    why: str = ""
    num_epochs: int
    num_ranks: int
    """In the last epoch."""
    wall_s: float
    start_s: float | None
    """From the beginning until every rank had done its first step."""
    failures: tuple[Failure, ...]

    @property
    def recoveries_s(self) -> tuple[float, ...]:
        """Of the failures after which every rank did a step again."""
        return tuple(f.recovery_s for f in self.failures if f.recovery_s is not None)

    def summary(self) -> str:
        """In a line.

        >>> Account(outcome="finished", num_epochs=1, num_ranks=4, wall_s=9.0, start_s=2.0, failures=()).summary()
        'finished on 4 ranks after 9.0 s without a failure'
        """
        said = f"{self.outcome} on {self.num_ranks} ranks after {self.wall_s:.1f} s"
        if not self.failures:
            return f"{said} without a failure" + (f": {self.why}" if self.why else "")
        said += f" and {len(self.failures)} failure{'s' if len(self.failures) > 1 else ''}"
        back = self.recoveries_s
        if back:
            said += f"; recovered in {median(back):.1f} s (median), {max(back):.1f} s (longest)"
        return said + (f": {self.why}" if self.why else "")
