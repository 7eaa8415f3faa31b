"""What light observation is said to cost."""

from __future__ import annotations

import pytest

from flatout.check.observe.operators.overhead import LightWork, light_cost_s
from flatout.check.observe.steps.schedule import Mode
from flatout.check.observe.steps.timeline import TimedStep


def watched(duration_s: float, *, num: int = 40, root_calls: int = 1) -> list[TimedStep]:
    return [TimedStep(Mode.LIGHT.value, duration_s + i * 1e-7, {}, root_calls, 4) for i in range(num)]


def cost_s(steps: list[TimedStep], *, unwatched_s: float, module_calls: float = 0.0, other_s: float = 0.0) -> float:
    work = LightWork(
        module_calls=module_calls,
        sampler_s=0.0,
        other_s=other_s,
        ordinary_s=[s.duration_s for s in steps],
        unwatched_s=[unwatched_s + i * 1e-7 for i in range(400)] if unwatched_s else [],
    )
    return light_cost_s(steps, work, is_device=False)


def test_watched_steps_that_are_longer_than_unwatched_ones_cost_the_difference() -> None:
    alike = cost_s(watched(0.010), unwatched_s=0.010)

    assert cost_s(watched(0.012), unwatched_s=0.010) == pytest.approx(40 * 0.002 + 400 * 20e-6, rel=0.05)
    assert alike < 0.5 * 40 * 0.002


def test_a_rollout_of_many_small_calls_has_its_price_where_there_is_nothing_to_compare_with() -> None:
    few, many = (cost_s(watched(0.1, root_calls=n), unwatched_s=0.0) for n in (1, 256))

    assert many > few + 40 * 255 * 10e-6


def test_calls_inside_modules_and_what_was_measured_by_itself_count() -> None:
    plain = cost_s(watched(0.010), unwatched_s=0.010)

    assert cost_s(watched(0.010), unwatched_s=0.010, module_calls=1e6) > plain + 0.2
    assert cost_s(watched(0.010), unwatched_s=0.010, other_s=0.5) > plain + 0.4
