"""Who makes batches fastest: this process, threads of it, or other processes; chosen by what was measured."""

from __future__ import annotations

import os
from math import ceil
from typing import Final, Literal, NamedTuple

_NO_COST: Final = 0.03
"""Of the time of a step with its batch: what making it here may take before other ways are tried."""
_BETTER: Final = 0.97
"""Of that time: what another way must not exceed to be worth its threads or processes."""


class Way(NamedTuple):
    """One of them, and how many."""

    kind: Literal["here", "threads", "processes"]
    num: int

    def __str__(self) -> str:
        return "this process" if self.kind == "here" else f"{self.num} {self.kind}"


class Tried(NamedTuple):
    """How it went in one way: seconds from batch to batch, and of those the seconds until a batch was there."""

    way: Way
    batch_s: float
    wait_s: float


class Choice:
    """Goes through the ways, one trial each, and settles for one. With `fixed` there is nothing to choose."""

    def __init__(self, fixed: Way | None, *, has_threads: bool, num_cores: int = 0) -> None:
        self._has_threads = has_threads
        self._num_cores = num_cores or len(os.sched_getaffinity(0))
        self._left: list[Way] = []
        self.is_made = fixed is not None
        """Whether there is nothing to try any more."""
        self.way = fixed or Way("here", 0)
        """That is tried, or was chosen."""
        self.tried: tuple[Tried, ...] = ()
        """What was found."""

    def tell(self, way: Way, batch_s: float, wait_s: float) -> None:
        """What a trial has found.

        >>> choice = Choice(None, has_threads=False, num_cores=8)
        >>> choice.tell(choice.way, 0.025, 0.015)
        >>> str(choice.way), choice.is_made
        ('3 processes', False)
        >>> choice.tell(choice.way, 0.011, 0.001)
        >>> str(choice.way), choice.is_made
        ('3 processes', True)
        """
        self.tried = (*self.tried, Tried(way, batch_s, wait_s))
        if way.kind == "here" and wait_s > _NO_COST * batch_s:
            enough = ceil(wait_s / max(batch_s - wait_s, 1e-9)) + 1
            num = max(1, min(self._num_cores, enough))
            self._left = [Way("threads", num)] if self._has_threads else []
            self._left.append(Way("processes", num))
        if self._left:
            self.way = self._left.pop(0)
            return
        here, best = self.tried[0], min(self.tried, key=lambda t: t.batch_s)
        self.way = best.way if best.batch_s < _BETTER * here.batch_s else here.way
        self.is_made = True
