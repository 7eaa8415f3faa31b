from __future__ import annotations

import sys
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.check.observe.lines.sampler import UNWATCHED, SampledLine, Sampler
from flatout.check.observe.steps.blocks import (
    AIM_FRACTION,
    LONGEST,
    WATCHED_STEP_S,
    Rhythm,
    UnwatchedBlocks,
    block_size,
)
from flatout.core.records.workload import Source
from flatout.core.runtime.source_sites import Sites


@given(st.floats(1e-6, 10.0), st.integers(0, 100_000))
def test_block_is_no_longer_than_needed(step_s: float, num_steps: int) -> None:
    size = block_size(step_s, num_steps=num_steps)
    assert 0 <= size <= LONGEST
    assert size <= num_steps
    assert size * step_s * AIM_FRACTION <= WATCHED_STEP_S * (1 + 1e-9)


def test_long_steps_are_all_watched() -> None:
    assert block_size(0.2, num_steps=10_000) == 0


def run(durations: list[float]) -> tuple[dict[int, int], int]:
    """The numbers of the watched steps with what each stands for, and how many steps went by."""
    blocks = UnwatchedBlocks()
    watched: dict[int, int] = {}
    number = 0
    while number < len(durations):
        number += 1
        watched[number] = blocks.weight
        blocks.rhythm.add(number, durations[number - 1])
        size = blocks.open(durations[number - 1], num_steps=number)
        for index in range(size):
            if number + index >= len(durations):
                return watched, number + blocks.cut()
            blocks.ends_s.append(blocks.ends_s[-1] + 1e-4 if blocks.ends_s else 1e-4)
            if index == size - 1 or index % 3 == 0:
                blocks.settle(num_steps=number)
        number += size
    return watched, number


@pytest.mark.slow
@given(st.integers(1, 400), st.floats(1e-4, 1e-1))
def test_watched_steps_stand_for_all_that_went_by(num: int, step_s: float) -> None:
    watched, num_steps = run([step_s] * num)
    assert num_steps == num
    assert sum(watched.values()) <= num
    assert sum(watched.values()) >= num - 2 * LONGEST - 2


@given(st.integers(5, 60))
def test_steps_that_stand_out_are_met_once_their_rhythm_is_known(period: int) -> None:
    rhythm = Rhythm()
    for number in range(1, 4 * period):
        rhythm.add(number, 3.0 if number % period == 0 else 1.0)
    assert rhythm.next_after(4 * period - 1) == 4 * period
    assert rhythm.next_after(4 * period) == 5 * period


def test_no_rhythm_no_prediction() -> None:
    rhythm = Rhythm()
    for number in range(1, 100):
        rhythm.add(number, 1.0)
    assert rhythm.next_after(100) is None


def test_a_block_ends_before_a_step_that_is_due() -> None:
    blocks = UnwatchedBlocks()
    for number in range(1, 401):
        blocks.rhythm.add(number, 1.0 if number % 110 == 0 else 1e-4)
    assert blocks.open(1e-4, num_steps=401) == 38
    assert blocks.is_open
    start_s = perf_counter()
    blocks.ends_s += [start_s + 0.1 * n for n in range(1, 39)]
    durations_s = blocks.settle(num_steps=401, compile_s=0.04)
    assert [round(s, 2) for s in durations_s[1:]] == [0.1] * 36 + [0.06]
    assert not blocks.is_open
    assert blocks.weight == 1


def test_a_block_takes_no_more_room_than_there_is() -> None:
    blocks = UnwatchedBlocks()
    for number in range(1, 401):
        blocks.rhythm.add(number, 1.0 if number % 110 == 0 else 1e-4)
    assert blocks.open(1e-4, num_steps=401, room=20) == 20
    start_s = perf_counter()
    blocks.ends_s += [start_s + 0.1 * n for n in range(1, 21)]
    blocks.settle(num_steps=401)
    assert blocks.weight == 21  # it was not aimed at the step that stands out


def test_samples_of_unwatched_steps_are_shared_out_as_their_line_is_in_watched_ones() -> None:
    sites = Sites()
    first, below, second, third, fourth = (
        sites.add(Source(file="/a.py", line=line, library=library))
        for line, library in ((1, ""), (1, "numpy/x.py:3"), (2, ""), (3, ""), (4, ""))
    )
    sampler = Sampler(sites, phase=lambda: "other")
    for phase, site, seconds in (
        ("forward", first, 0.3),
        ("backward", first, 0.1),
        ("data", second, 0.1),
        (UNWATCHED, below, 0.4),
        (UNWATCHED, third, 0.3),
        (UNWATCHED, fourth, 0.2),
    ):
        sampler.seconds[SampledLine(phase, site, True)] = seconds
        sampler.samples[SampledLine(phase, site, True)] = 1
    known = {("/a.py", 1): {"optimizer": 1.0}, ("/a.py", 4): {"forward": 0.03, "data": 0.01}}
    found = {(spot.phase, spot.site): (round(s, 9), round(n, 9)) for spot, s, n in sampler.by_phase(known)}
    assert found == {
        ("forward", first): (0.3, 1),
        ("backward", first): (0.1, 1),
        ("data", second): (0.1, 1),
        ("forward", below): (0.3, 0.75),
        ("backward", below): (0.1, 0.25),
        ("other", third): (0.3, 1),
        ("forward", fourth): (0.15, 0.75),
        ("data", fourth): (0.05, 0.25),
    }


def test_samples_of_an_unwatched_step_wait_for_its_end() -> None:
    sampler = Sampler(Sites(), phase=lambda: UNWATCHED)
    sampler.is_on = True
    sampler._sample(sys._getframe())
    assert not sampler.seconds
    sampler.settle("evaluation")
    assert [spot.phase for spot in sampler.samples] == ["evaluation"]
