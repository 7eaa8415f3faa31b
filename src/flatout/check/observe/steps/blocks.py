"""Short steps go by unwatched in blocks, only timed, so that watching one now and then costs the loop almost nothing.

A step that stands out (an evaluation pass every 50 steps, a checkpoint) would seldom be the one that is watched. So those that
stand out are noted, and once their rhythm is known, blocks end just before the next of them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from itertools import pairwise
from time import perf_counter
from typing import Final

WATCHED_STEP_S: Final = 300e-6
"""What watching one step lightly costs, whatever its length, disturbed caches too, and putting the watches in place for it.

120 us on a quiet 2026 server core (`bench/light_cost.py`), 300 us and more on one that others use too.
"""
WATCHED_ROOT_S: Final = 20e-6
"""What each call of a root module adds to that; on a device, where its borders are marked by events, `WATCHED_ROOT_DEVICE_S`."""
WATCHED_ROOT_DEVICE_S: Final = 35e-6
"""Measured on the host of an H200 (torch 2.11): 40 root modules made a step of 5.4 ms 1.4 ms longer."""
AIM_FRACTION: Final = 0.002
"""The share of the loop's time that watching steps may take; samples and idle watches take theirs besides."""
LONGEST: Final = 400
_STEPS_PER_UNWATCHED: Final = 4
_STANDS_OUT: Final = 1.5
_REMEMBERED: Final = 12
_JITTER: Final = 7


def block_size(step_s: float, *, num_steps: int, watch_s: float = WATCHED_STEP_S) -> int:
    """How many steps of `step_s` seconds go by unwatched before the next watched one, `num_steps` steps into the loop.

    `watch_s` is what watching one costs. Blocks grow with the loop, so that a short script is still watched often.
    """
    return min(LONGEST, num_steps // _STEPS_PER_UNWATCHED, int(watch_s / (AIM_FRACTION * step_s)))


class Rhythm:
    """Finds steps that stand out by their length, and when the next is due."""

    def __init__(self) -> None:
        self._out: deque[int] = deque(maxlen=_REMEMBERED)
        self._recent_s: deque[float] = deque(maxlen=64)
        self._limit_s = math.inf

    def add(self, number: int, *durations_s: float) -> None:
        """Step `number` and those that followed it took so long."""
        self._recent_s.extend(durations_s)
        self._limit_s = _STANDS_OUT * statistics.median(self._recent_s)
        self._out.extend(n for n, duration_s in enumerate(durations_s, start=number) if self.stands_out(duration_s))

    def stands_out(self, duration_s: float) -> bool:
        """Whether a step of this length is unlike those before."""
        return duration_s > self._limit_s

    def next_after(self, number: int, *, rarer_than: int = 0) -> int | None:
        """The first step after `number` that should stand out; None while no rhythm slower than `rarer_than` steps is known.

        >>> rhythm = Rhythm()
        >>> for n in range(1, 41):
        ...     rhythm.add(n, 5.0 if n % 10 == 0 else 1.0)
        >>> rhythm.next_after(43)
        50
        """
        out = list(self._out)
        periods = Counter(b - a for i, a in enumerate(out) for b in out[i + 1 :])
        if not periods:
            return None
        period, count = max(periods.items(), key=lambda item: (item[1], -item[0]))
        last = max((n for n in out if n - period in self._out), default=None)
        if count < 2 or last is None or period <= rarer_than:
            return None
        return last + period * max(1, -(-(number + 1 - last) // period))


class UnwatchedBlocks:
    """The unwatched steps of one observation: how long each took, and how many each watched step stands for."""

    def __init__(self) -> None:
        self.durations_s: list[float] = []
        self.weight = 1
        """How many steps the step watched now stands for."""
        self.rhythm = Rhythm()
        self.ends_s: list[float] = []
        """When each step of the open block ended: stamped by whoever sees it, taken in by `settle`."""
        self._num_blocks = 0
        self.size = 0
        """Steps in the last block."""
        self.num_settled = 0
        """How many of those ends have been taken in."""
        self._last_s = 0.0
        self._unrepresented = 0
        self._is_aimed = False

    @property
    def is_open(self) -> bool:
        """Whether steps go by unwatched now."""
        return self.num_settled < self.size

    def open(self, step_s: float, *, num_steps: int, watch_s: float = WATCHED_STEP_S, room: int = LONGEST) -> int:
        """A watched step has ended, `num_steps` into the loop: begin a block of at most `room`; returns its size, 0 for none."""
        size = block_size(step_s, num_steps=num_steps, watch_s=watch_s)
        self._num_blocks += 1
        # Else blocks and a fast rhythm could miss one another for ever.
        size -= self._num_blocks % min(_JITTER, size // 2 + 1)
        due = self.rhythm.next_after(num_steps, rarer_than=size + 1)
        self._is_aimed = due is not None and due <= num_steps + size + 1
        if due is not None and self._is_aimed:
            size = due - num_steps - 1
        size = min(size, room)
        self._is_aimed &= due == num_steps + size + 1
        self.size = size
        self.num_settled = 0
        self.ends_s = []
        self._last_s = perf_counter()
        if not size:
            self._weigh()
        return size

    def settle(self, *, num_steps: int, compile_s: float = 0.0) -> list[float]:
        """Take in the ends stamped since the last time, at least one; returns the seconds of those steps.

        The block began `num_steps` steps into the loop; `compile_s` is what compiling took of the last of the steps.
        """
        new = self.ends_s[self.num_settled :]
        durations_s = [end_s - start_s for start_s, end_s in pairwise((self._last_s, *new))]
        durations_s[-1] -= compile_s
        self.durations_s += durations_s
        self._last_s = new[-1]
        self.num_settled += len(new)
        if not self.is_open:
            self.rhythm.add(num_steps + 1, *self.durations_s[-self.size :])
            self._weigh()
        return durations_s

    @property
    def num_gone(self) -> int:
        """Steps of the open block that have gone by; 0 when none is open."""
        return len(self.ends_s) if self.is_open else 0

    def cut(self) -> int:
        """The observation ended in the middle of a block; returns how many of its steps went by."""
        num_gone = self.num_gone
        self.num_settled = self.size
        return num_gone

    def _weigh(self) -> None:
        # A step that was aimed at stands for itself; the others stand for those that went by since the last such one.
        if self._is_aimed:
            self._unrepresented += self.size
            self.weight = 1
        else:
            self.weight = self._unrepresented + self.size + 1
            self._unrepresented = 0
