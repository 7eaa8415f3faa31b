"""The timer on a clock that only the timed calls move: exact numbers, no waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import pytest

from flatout.core.errors import UsageError
from flatout.machine.measure.timer import MAX_BATCH, HostClock, clock_for, compare_times, time_call


class World:
    """Time passes only when a call spends it; `speed` slows everything down alike."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.speed = 1.0
        self.order: list[str] = []

    def call(self, name: str, durations_s: list[float]) -> Callable[[], None]:
        left: Iterator[float] = cycle(durations_s)

        def run() -> None:
            self.order.append(name)
            self.now_s += next(left) * self.speed

        return run

    def clock(self, settle: Callable[[], None] | None = None) -> HostClock:
        return HostClock(now_s=lambda: self.now_s, settle=settle)


def test_a_steady_call_is_timed_exactly() -> None:
    world = World()
    timing = time_call(world.call("f", [0.01]), clock=world.clock())
    assert timing.call_s.value == pytest.approx(0.01)
    assert timing.calls_per_sample == 1
    assert timing.spread == pytest.approx(0, abs=1e-9)
    assert timing.ratio is None


def test_warm_up_is_left_out() -> None:
    world = World()
    slow_start = world.call("f", [5e-2, 4e-2, *[1e-2] * 1000])
    assert max(time_call(slow_start, clock=world.clock()).samples_s) == pytest.approx(1e-2)


def test_one_outlier_does_not_move_the_median() -> None:
    world = World()
    timing = time_call(world.call("f", [0.01] * 9 + [1.0]), warmup=1, max_time_s=5.0, clock=world.clock())
    assert timing.call_s.value == pytest.approx(0.01)


def test_short_calls_are_batched_and_reported_per_call() -> None:
    world = World()
    timing = time_call(world.call("f", [1e-6]), clock=world.clock())
    assert timing.calls_per_sample == 500
    assert timing.call_s.value == pytest.approx(1e-6)


def test_a_batch_stays_below_the_launch_queue() -> None:
    world = World()
    assert time_call(world.call("f", [1e-8]), clock=world.clock()).calls_per_sample == MAX_BATCH


def test_the_time_limit_holds_for_a_slow_call() -> None:
    world = World()
    timing = time_call(world.call("f", [0.3]), min_time_s=0.5, max_time_s=1.0, clock=world.clock())
    assert world.now_s <= 1.0
    assert 1 <= len(timing.samples_s) <= 3


def test_a_call_longer_than_the_limit_is_still_timed_once() -> None:
    world = World()
    timing = time_call(world.call("f", [7.0]), max_time_s=1.0, clock=world.clock())
    assert timing.samples_s == (7.0,)
    assert len(world.order) == 2  # warm-up and the sample


def test_settling_is_not_timed() -> None:
    world = World()

    def settle() -> None:
        world.now_s += 100

    assert time_call(world.call("f", [0.01]), clock=world.clock(settle)).call_s.value == pytest.approx(0.01)


def test_compare_alternates_the_order_of_rounds() -> None:
    world = World()
    compare_times({"a": world.call("a", [0.1]), "b": world.call("b", [0.1])}, warmup=1, clock=world.clock())
    assert world.order[:2] == ["a", "b"]  # warm-up
    assert world.order[2:10] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_settled_calls_are_timed_without_what_the_other_call_left_behind() -> None:
    world = World()
    last = ""

    def after_itself(name: str, own_s: float) -> Callable[[], None]:
        def run() -> None:
            nonlocal last
            world.now_s += own_s + (0.0 if last == name else 0.05)  # 50 ms to fault in what the other call gave back
            last = name

        return run

    calls = {"now": after_itself("now", 0.1), "cured": after_itself("cured", 0.02)}
    as_they_come = compare_times(calls, clock=world.clock())
    settled = compare_times(calls, clock=world.clock(), is_settled=True)
    hurried = compare_times(calls, clock=world.clock(), is_settled=True, max_time_s=0.6)

    assert as_they_come["cured"].call_s.value > 0.02
    assert settled["now"].call_s.value == pytest.approx(0.1)
    assert settled["cured"].call_s.value == pytest.approx(0.02)
    assert hurried["cured"].call_s.value > 0.02  # no time to call each once more


def test_compare_finds_the_ratio_on_a_machine_that_slows_down() -> None:
    world = World()
    before, after = world.call("before", [0.02]), world.call("after", [0.01])

    def slowing() -> None:
        before()
        world.speed *= 1.001

    timings = compare_times({"before": slowing, "after": after}, clock=world.clock())
    assert timings["before"].ratio is None
    ratio = timings["after"].ratio
    assert ratio is not None
    assert ratio.low <= 0.5 * 1.001 and ratio.high >= 0.5 / 1.001
    assert ratio.high - ratio.low < 0.01
    # The times themselves drifted by far more.
    assert max(timings["before"].samples_s) > 1.01 * min(timings["before"].samples_s)


def test_a_clock_too_coarse_to_see_the_first_call_gives_no_ratio() -> None:
    world = World()
    timings = compare_times({"a": world.call("a", [0.0]), "b": world.call("b", [0.1])}, clock=world.clock())
    assert timings["b"].ratio is None


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to time"):
        compare_times({})
    with pytest.raises(UsageError, match="min <= max"):
        time_call(lambda: None, min_time_s=2.0, max_time_s=1.0)
    with pytest.raises(UsageError, match="cannot time on device 'meta'"):
        clock_for("meta")
