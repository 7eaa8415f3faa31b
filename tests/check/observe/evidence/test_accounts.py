from __future__ import annotations

import pytest

from flatout.check.observe.evidence.accounts import nearby_steps
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import TimedStep


def timed(*steps: tuple[Mode, float]) -> list[TimedStep]:
    return [TimedStep(mode.value, seconds, {"backward": seconds / 2}, 1, 4) for mode, seconds in steps]


def test_steps_after_the_profiler_was_opened_do_not_say_how_long_the_host_takes() -> None:
    before = [(Mode.LIGHT, 0.065)] * 5
    watched = [(Mode.KERNELS, 0.3), (Mode.DEEP, 0.5)]
    found = nearby_steps(timed(*before, *watched, *[(Mode.LIGHT, 0.081)] * 20), num_deep=1)
    assert found.step_s == pytest.approx(0.065)
    assert found.groups["backward"] == pytest.approx(0.0325)


def test_without_a_profiler_the_closest_steps_count_since_steps_may_grow() -> None:
    steps = timed(*[(Mode.LIGHT, 0.01 * i) for i in range(1, 31)], (Mode.DEEP, 0.5), (Mode.LIGHT, 0.31))
    assert nearby_steps(steps, num_deep=1).step_s == pytest.approx(0.27)


def test_a_loop_with_no_light_step_before_the_profiler_has_those_after_it() -> None:
    steps = timed((Mode.KERNELS, 0.3), (Mode.DEEP, 0.5), (Mode.LIGHT, 0.08))
    assert nearby_steps(steps, num_deep=1).step_s == pytest.approx(0.08)
