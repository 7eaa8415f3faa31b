"""How often to keep a state: as often as is said, or as measured stalls, steps and restarts make best."""

from __future__ import annotations

from statistics import median
from typing import Final, Literal

from flatout.errors import UsageError
from flatout.records.failure import Failures, Recovery
from flatout.simulate.failures import best_interval_s

Every = int | Literal["measured"]
_TRIED: Final = 8
"""Steps that are measured, each of them kept."""
_DAY_S: Final = 86400.0


class Interval:
    """`is_due(step)`; a measured one is first due at each step, and from `is_measured` on as `settle` says."""

    def __init__(self, every: Every | None, mtbf_s: float | None, name: str) -> None:
        if every == "measured" and not (mtbf_s is not None and mtbf_s > 0):
            raise UsageError(
                f"{name} is 'measured' and mtbf_s {mtbf_s}; give the mean seconds between failures of the job"
            )
        if not (every is None or every == "measured" or (type(every) is int and every >= 1)):
            raise UsageError(f"{name} is {every!r}; give 1 step or more, 'measured', or None")
        self._mtbf_s = mtbf_s
        self.steps: int | None = None if every == "measured" else every
        """Between two; None for never, or while it is measured."""
        self._is_measuring = every == "measured"
        self._stalls_s: list[float] = []
        self._steps_s: list[float] = []

    def is_due(self, step: int) -> bool:
        return self._is_measuring or (self.steps is not None and step % self.steps == 0)

    def note(self, stall_s: float, step_s: float | None) -> bool:
        """What keeping cost, and the step before it; whether enough is known now to settle."""
        if not self._is_measuring:
            return False
        self._stalls_s.append(stall_s)
        self._steps_s += [step_s] if step_s is not None else []
        return len(self._stalls_s) == _TRIED

    @property
    def measured(self) -> tuple[float, float]:
        """Medians of a stall and of a step, in seconds."""
        return median(self._stalls_s), median(self._steps_s)

    def settle(self, stall_s: float, step_s: float, restart_s: float) -> int:
        """Fix the interval for these seconds, the same on all ranks; in steps."""
        assert self._mtbf_s is not None
        self.steps = best_steps(stall_s=stall_s, step_s=step_s, restart_s=restart_s, mtbf_s=self._mtbf_s)
        self._is_measuring = False
        return self.steps


def best_steps(*, stall_s: float, step_s: float, restart_s: float, mtbf_s: float) -> int:
    """Steps between two saves that leave the most of the time (simulate.failures: Daly 2006, Young 1974), at least 1.

    >>> best_steps(stall_s=0.5, step_s=1.0, restart_s=10.0, mtbf_s=810.0)
    28
    """
    failures = Failures(num_nodes=1, per_thousand_node_days=1000 * _DAY_S / mtbf_s)
    return max(1, round(best_interval_s(failures, Recovery(stall_s=stall_s, restart_s=restart_s)) / step_s))
