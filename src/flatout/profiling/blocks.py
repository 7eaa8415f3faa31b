"""Short steps go by unwatched in blocks, timed as a whole, so that watching one now and then costs the loop almost nothing."""

from __future__ import annotations

from time import perf_counter
from typing import Final

WATCHED_STEP_S: Final = 120e-6
"""What watching one step lightly costs, whatever its length, disturbed caches too (2026 server core; `bench/light_cost.py`)."""
AIM_FRACTION: Final = 0.002
"""The share of the loop's time that watching steps may take; samples and idle watches take theirs besides."""
LONGEST: Final = 100
_SEEN_PER_UNWATCHED: Final = 4


def block_size(step_s: float, *, seen: int) -> int:
    """How many steps of `step_s` seconds go by unwatched before the next watched one, `seen` steps into the loop.

    Blocks grow with the loop, so that a short script is still seen often.
    """
    return min(LONGEST, seen // _SEEN_PER_UNWATCHED, int(WATCHED_STEP_S / (AIM_FRACTION * step_s)))


class Blocks:
    """The blocks of one observation: the mean step of each, and all their steps together."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_cut = 0
        """Steps of a block that did not come to its end: seen by the sampler, but not timed."""
        self.total_s = 0.0
        self._size = 0
        self._began_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether steps go by unwatched now."""
        return self._size > 0

    @property
    def size(self) -> int:
        """Steps in the open block."""
        return self._size

    def open(self, size: int) -> None:
        """A block of `size` steps begins."""
        self._size = size
        self._began_s = perf_counter()

    def close(self, *, compile_s: float = 0.0) -> float:
        """The block is over; returns its seconds without those of compiling."""
        block_s = perf_counter() - self._began_s - compile_s
        self.num_steps += self._size
        self.total_s += block_s
        self._size = 0
        return block_s

    def cut(self, num_left: int) -> int:
        """The block ended `num_left` steps early; returns how many went by."""
        num_gone = self._size - num_left
        self.num_cut += num_gone
        self._size = 0
        return num_gone
