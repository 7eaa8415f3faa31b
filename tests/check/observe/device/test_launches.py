"""The log of operators is laid over the profiler's calls, whose clock is known only roughly."""

from __future__ import annotations

import random

import pytest

from flatout.check.observe.device.launches import LaunchEntry, PlaceLog
from flatout.check.traces.events import CallPlace, HostCall

OFFSET_NS = 5_000_000


def recorded(
    *, off_ns: int, drift_fraction: float = 0.0, num: int = 1500
) -> tuple[list[LaunchEntry], list[HostCall], list[str]]:
    """Operators of 8 to 30 us in a row, every third a view; the others launch one kernel each, by a clock that is off."""
    rng = random.Random(0)
    entries, calls, names = [], [], []
    at = 0
    for number in range(num):
        length = rng.randrange(8_000, 30_000)
        is_view = number % 3 == 0
        entries.append(LaunchEntry(at, at + length, 1, CallPlace(number, "forward", f"aten.op{number}"), is_view))
        if not is_view:
            launch = at + length * 3 // 4
            start = launch + OFFSET_NS + off_ns + round(drift_fraction * launch)
            calls.append(HostCall(start, start + 4_000, "cudaLaunchKernel", number, 77))
            names.append(f"aten.op{number}")
        at += length + rng.randrange(2_000, 12_000)
    return entries, calls, names


@pytest.mark.parametrize("off_ns", [0, 15_000, -40_000, 120_000])
@pytest.mark.parametrize("drift_fraction", [0.0, 1e-4])
def test_launches_find_their_operators_though_the_clocks_are_off(off_ns: int, drift_fraction: float) -> None:
    entries, calls, names = recorded(off_ns=off_ns, drift_fraction=drift_fraction)
    log = PlaceLog(entries, calls, offset_ns=OFFSET_NS)
    found = [place.op if (place := log.place_of(call)) is not None else "" for call in calls]
    right = sum(a == b for a, b in zip(found, names, strict=True))
    assert right > 0.97 * len(names)


def test_a_clock_that_is_right_is_left_alone() -> None:
    entries, calls, names = recorded(off_ns=0, num=30)
    log = PlaceLog(entries, calls, offset_ns=OFFSET_NS)
    assert [p.op for c in calls if (p := log.place_of(c)) is not None] == names


def test_without_launches_or_operators_nothing_is_placed() -> None:
    entries, calls, _ = recorded(off_ns=0, num=3)
    assert PlaceLog([], calls, offset_ns=OFFSET_NS).place_of(calls[0]) is None
    assert PlaceLog(entries, [], offset_ns=OFFSET_NS).place_of(calls[0]) is not None
