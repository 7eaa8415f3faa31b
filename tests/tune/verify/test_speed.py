"""Races of made-up scripts, whose times and memory are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.speed import Race

MIB = 1 << 20


class Side:
    """Answers as a standing script whose steps take `step_s` and whose peak after so many steps is `peak`."""

    def __init__(self, step_s: float, peak: Callable[[int], float]) -> None:
        self._step_s, self._peak = step_s, peak
        self._done = self._size = 0
        self.random = random.Random(0)

    def order(self, num_steps: int) -> None:
        self._size = num_steps
        self._done += num_steps

    def answer(self, *, timeout_s: float) -> SideAnswer:
        noise = 1 + 0.5 * self.random.random()
        return SideAnswer(
            what="ran",
            num_steps=self._done,
            seconds=self._step_s * self._size * noise,
            peak_bytes=int(self._peak(self._done)),
        )


def raced(before: Side, after: Side) -> Race:
    race = Race(budget_s=12.0, timeout_s=1.0)
    after.random.seed(1)
    race.run(before, after)  # type: ignore[arg-type]
    return race


def flat(_: int) -> float:
    return 400.0 * MIB


def longest_so_far(num_steps: int) -> float:
    """Batches of random lengths, some of which are beyond all before: every 16th here."""
    return (400 + 8 * (num_steps // 16)) * MIB


def test_the_ratio_is_that_of_the_steps() -> None:
    speed = raced(Side(0.04, flat), Side(0.02, flat)).speed()
    assert speed is not None and speed.is_faster
    assert speed.ratio == pytest.approx(2.0, rel=0.15)
    assert speed.low <= 2.0 <= speed.high


def test_memory_that_grows_with_every_step_is_a_leak() -> None:
    race = raced(Side(0.05, flat), Side(0.05, lambda n: (400 + 1.5 * n) * MIB))
    assert "grows by 1.5 MiB a step" in race.leak()
    assert raced(Side(0.05, flat), Side(0.05, lambda n: (4000 + 1.5 * n) * MIB)).leak() == ""
    both = raced(Side(0.05, lambda n: (400 + 1.5 * n) * MIB), Side(0.05, lambda n: (400 + 1.5 * n) * MIB))
    assert both.leak() == ""


def test_memory_that_grows_with_the_longest_batch_so_far_is_none() -> None:
    assert longest_so_far(110) - longest_so_far(10) > 32 * MIB
    assert raced(Side(0.05, flat), Side(0.05, longest_so_far)).leak() == ""
