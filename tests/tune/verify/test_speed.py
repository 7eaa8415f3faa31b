"""Races of made-up scripts, whose times and memory are known."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed
from flatout.tune.verify.speed import Race

MIB = 1 << 20


class Side:
    """Answers as a standing script whose steps take `step_s` and whose peak after so many steps is `peak`."""

    def __init__(self, step_s: float, peak: Callable[[int], float]) -> None:
        self._step_s, self._peak = step_s, peak
        self._done = self._size = 0
        self.random = random.Random(0)

    @property
    def num_done(self) -> int:
        return self._done

    def order(self, num_steps: int, *, is_lean: bool = False) -> None:
        self._size = num_steps
        self._done += num_steps + is_lean

    def answer(self, *, timeout_s: float) -> SideAnswer:
        noise = 1 + 0.5 * self.random.random()
        return SideAnswer(
            what="ran",
            num_steps=self._done,
            seconds=self._step_s * self._size * noise,
            peak_bytes=int(self._peak(self._done)),
        )


class Filling(Side):
    """Its first steps take 40 ms each without noise, the others 20 ms."""

    def __init__(self, num_filling: int) -> None:
        super().__init__(0.02, flat)
        self._num_filling = num_filling

    def answer(self, *, timeout_s: float) -> SideAnswer:
        answer = super().answer(timeout_s=timeout_s)
        return msgspec.structs.replace(answer, seconds=0.04 * self._size) if self._done <= self._num_filling else answer


def raced(before: Side, after: Side, *, is_lean: bool = False) -> Race:
    race = Race(budget_s=12.0, timeout_s=1.0, is_lean=is_lean)
    after.random.seed(1)
    race.run(before, after)  # type: ignore[arg-type]
    return race


def flat(_: int) -> float:
    return 400.0 * MIB


def longest_so_far(num_steps: int) -> float:
    """Batches of random lengths, some of which are beyond all before: every 16th here."""
    return (400 + 8 * (num_steps // 16)) * MIB


@pytest.mark.parametrize("is_lean", [False, True])
def test_the_ratio_is_that_of_the_steps(is_lean: bool) -> None:
    speed = raced(Side(0.04, flat), Side(0.02, flat), is_lean=is_lean).speed()
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


def test_the_changed_side_alone_fills_its_caches_before_the_race() -> None:
    """A cache that is filled in 100 steps of 40 ms, and steps of 20 ms after that."""
    race = Race(budget_s=12.0, timeout_s=1.0, warm_up_steps=100)
    before, after = Side(0.04, flat), Filling(100)
    race.started(SideAnswer(what="recorded", num_steps=8, seconds=1.0), SideAnswer(what="recorded", num_steps=8))
    race.run(before, after)  # type: ignore[arg-type]
    speed = race.speed()
    assert speed is not None and speed.ratio == pytest.approx(2.0, rel=0.15)
    assert after.num_done - before.num_done == 100
    assert speed.num_first == 108
    assert speed.first_before_s == pytest.approx(1.0 + 100 * speed.before_s)
    assert speed.first_after_s == pytest.approx(100 * 0.04)


class Rollouts(Side):
    """Every 16th step has a rollout before it, of 50 ms; updates take 1 ms."""

    def answer(self, *, timeout_s: float) -> SideAnswer:
        answer = super().answer(timeout_s=timeout_s)
        num_rollouts = self._done // 16 - (self._done - self._size) // 16
        return msgspec.structs.replace(answer, seconds=answer.seconds + 0.05 * num_rollouts)


def test_a_stretch_of_updates_has_its_rollouts() -> None:
    """Updates of half the time: 66 ms become 58 ms between two rollouts, though most updates come without one."""
    before, after = Rollouts(0.001, flat), Rollouts(0.0005, flat)
    after.random.seed(1)
    race = Race(budget_s=12.0, timeout_s=1.0, cycle=16)
    race.run(before, after)  # type: ignore[arg-type]
    assert all(s.num_steps % 16 == 0 for s in race.stretches)
    speed = race.speed()
    assert speed is not None and speed.ratio == pytest.approx(66 / 58, rel=0.1)


class Telling(Rollouts):
    """Tells how many steps lie between two rollouts once the second is over, if there is a second."""

    def __init__(self, step_s: float, *, tells_from: float = 32) -> None:
        super().__init__(step_s, flat)
        self._tells_from = tells_from

    def answer(self, *, timeout_s: float) -> SideAnswer:
        return msgspec.structs.replace(
            super().answer(timeout_s=timeout_s), cycle=16 if self._done >= self._tells_from else 0
        )


def test_sides_tell_how_many_updates_come_between_two_rollouts() -> None:
    before, after = Telling(0.001), Telling(0.0005)
    after.random.seed(1)
    race = Race(budget_s=12.0, timeout_s=1.0)
    race.run(before, after)  # type: ignore[arg-type]
    assert race.stretches and all(s.num_steps % 16 == 0 for s in race.stretches)
    speed = race.speed()
    assert speed is not None and speed.ratio == pytest.approx(66 / 58, rel=0.1)


def test_a_script_with_one_rollout_is_raced_all_the_same() -> None:
    before, after = Telling(0.02, tells_from=1e9), Telling(0.01, tells_from=1e9)
    race = Race(budget_s=1.0, timeout_s=1.0)
    race.run(before, after)  # type: ignore[arg-type]
    assert len(race.stretches) >= 7


class Fed(Side):
    """Batches of four workers come four at a time, each such cycle a third longer or shorter by what was ready."""

    def answer(self, *, timeout_s: float) -> SideAnswer:
        cycles = max(1, self._size // 4)
        jitter = (self.random.random() - 0.5) * 0.66 / cycles
        answer = super().answer(timeout_s=timeout_s)
        return msgspec.structs.replace(answer, seconds=self._step_s * self._size * (1 + jitter), num_workers=4)


def test_a_stretch_has_several_cycles_of_a_loaders_workers() -> None:
    race = raced(Fed(0.15, flat), Fed(0.12, flat))
    assert {stretch.num_steps for stretch in race.stretches} == {12}
    speed = race.speed()
    assert speed is not None and speed.is_faster


def test_but_not_of_very_long_ones() -> None:
    race = raced(Fed(1.0, flat), Fed(1.0, flat))
    assert {stretch.num_steps for stretch in race.stretches} == {1}


@pytest.mark.parametrize(("step_s", "least", "most"), [(1.0, 7, 8), (30.0, 0, 3)])
def test_a_race_of_long_steps_goes_on_until_its_pairs_are_enough_but_not_for_ever(
    step_s: float, least: int, most: int
) -> None:
    race = Race(budget_s=2.5, timeout_s=1.0)
    race.run(Side(step_s, flat), Side(0.7 * step_s, flat))  # type: ignore[arg-type]
    assert least <= len(race.stretches) <= most


class Restarting(Side):
    """Steps with little noise; before the 20th workers start over, for so long."""

    def __init__(self, step_s: float, restart_s: float) -> None:
        super().__init__(step_s, flat)
        self._restart_s = restart_s

    def answer(self, *, timeout_s: float) -> SideAnswer:
        answer = super().answer(timeout_s=timeout_s)
        is_in = self._done - self._size < 20 <= self._done
        seconds = self._step_s * self._size * (1 + 0.01 * self.random.random()) + self._restart_s * is_in
        return msgspec.structs.replace(answer, seconds=seconds, num_workers=8)


def test_a_start_of_workers_in_one_pair_of_stretches_hides_no_gain() -> None:
    """Long steps leave room for the fewest pairs alone, and their interval is the whole range: two pairs more are not."""
    before, after = Restarting(0.3, 3.0), Restarting(0.15, 6.0)
    after.random.seed(1)
    race = Race(budget_s=6.0, timeout_s=1.0)
    race.run(before, after)  # type: ignore[arg-type]
    ratios = [s.before_s / s.after_s for s in race.stretches]
    assert len(ratios) == 9 and sum(ratio < 1 for ratio in ratios) == 1
    speed = race.speed()
    assert speed is not None and speed.is_faster


def test_a_race_that_is_not_clear_otherwise_takes_the_fewest_pairs() -> None:
    race = Race(budget_s=1.0, timeout_s=1.0)
    before, after = Side(0.3, flat), Side(0.3, flat)
    after.random.seed(1)
    race.run(before, after)  # type: ignore[arg-type]
    assert len(race.stretches) == 7


class Ending(Side):
    """Ends after so many steps, by an error where it has one."""

    def __init__(self, num_steps: int, error: str) -> None:
        super().__init__(0.02, flat)
        self._num_steps, self._error = num_steps, error

    def answer(self, *, timeout_s: float) -> SideAnswer:
        answer = super().answer(timeout_s=timeout_s)
        if self._done < self._num_steps:
            return answer
        return SideAnswer(what="ended", num_steps=self._num_steps, error=self._error)


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_side_that_runs_out_of_memory_in_a_race_is_an_error(is_changed: bool) -> None:
    sides = [Side(0.02, flat), Ending(2, "CUDA out of memory. Tried to allocate 1 GiB")]
    with pytest.raises(Failed, match="ended after 2 steps of the race: CUDA out of memory"):
        raced(*sides) if is_changed else raced(*reversed(sides))


def test_a_changed_script_that_fails_in_a_race_is_an_error() -> None:
    with pytest.raises(Failed, match="the changed script ended after 20 steps of the race: ValueError: no"):
        raced(Side(0.02, flat), Ending(20, "ValueError: no"))


@pytest.mark.parametrize("error", ["", "StopIteration"])
def test_a_script_whose_steps_end_for_both_sides_has_ended(error: str) -> None:
    race = raced(Ending(200, error), Ending(200, error))
    assert race.num_steps == 200


class Diverging(Side):
    """Its weights are no finite numbers from the 20th step on."""

    def answer(self, *, timeout_s: float) -> SideAnswer:
        return msgspec.structs.replace(super().answer(timeout_s=timeout_s), is_finite=self._done < 20)


def test_a_changed_script_whose_weights_become_nan_is_an_error() -> None:
    with pytest.raises(Failed, match="weights of the changed script are no finite numbers any more after 2"):
        raced(Side(0.02, flat), Diverging(0.01, flat))


def test_where_they_do_in_both_the_race_goes_on() -> None:
    assert len(raced(Diverging(0.02, flat), Diverging(0.02, flat)).stretches) >= 7
