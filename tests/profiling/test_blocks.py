from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.profiling.blocks import AIM_FRACTION, LONGEST, WATCHED_STEP_S, Blocks, block_size
from flatout.profiling.sampler import UNWATCHED, Sampler, Spot
from flatout.profiling.sites import Sites


@given(st.floats(1e-6, 10.0), st.integers(0, 100_000))
def test_block_is_no_longer_than_needed(step_s: float, seen: int) -> None:
    size = block_size(step_s, seen=seen)
    assert 0 <= size <= LONGEST
    assert size <= seen
    assert size * step_s * AIM_FRACTION <= WATCHED_STEP_S * (1 + 1e-9)


def test_long_steps_are_all_watched() -> None:
    assert block_size(0.1, seen=10_000) == 0


def test_steps_of_a_block_cut_short_are_sampled_but_not_timed() -> None:
    blocks = Blocks()
    blocks.open(10)
    assert blocks.cut(4) == 6
    assert (blocks.num_steps, blocks.num_cut, blocks.is_open) == (0, 6, False)
    blocks.open(3)
    assert blocks.close() == blocks.total_s > 0
    assert blocks.num_steps == 3


def test_samples_of_unwatched_steps_go_to_the_phase_of_their_line() -> None:
    sampler = Sampler(Sites(), phase=lambda: "other")
    for phase, site, seconds in (("forward", 1, 0.2), ("data", 2, 0.1), (UNWATCHED, 1, 0.5), (UNWATCHED, 3, 0.3)):
        sampler.seconds[Spot(phase, site, True)] = seconds
        sampler.samples[Spot(phase, site, True)] = 1
    found = {(spot.phase, spot.site): (round(s, 9), n) for spot, s, n in sampler.by_phase()}
    assert found == {("forward", 1): (0.7, 2), ("data", 2): (0.1, 1), ("other", 3): (0.3, 1)}
