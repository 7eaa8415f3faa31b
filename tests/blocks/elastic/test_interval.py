"""How often a state is kept."""

from __future__ import annotations

from math import sqrt

import pytest

from flatout.blocks.elastic.survivor import KeepInterval, best_steps
from flatout.core.errors import UsageError


def test_the_best_interval_is_youngs_for_a_short_stall() -> None:
    steps = best_steps(stall_s=0.01, step_s=0.1, restart_s=1.0, mtbf_s=3600.0)
    assert steps == pytest.approx(sqrt(2 * 0.01 * 3600) / 0.1, rel=0.02)


def test_it_is_never_less_than_a_step() -> None:
    assert best_steps(stall_s=1e-4, step_s=10.0, restart_s=1.0, mtbf_s=3600.0) == 1


def test_a_measured_interval_keeps_each_step_until_it_knows() -> None:
    interval = KeepInterval("measured", 3600.0, "every")
    for step in range(1, 9):
        assert interval.is_due(step)
        assert interval.note(0.01 if step != 4 else 9.0, 0.1) == (step == 8)
    assert interval.settle(*interval.measured, 1.0) == best_steps(stall_s=0.01, step_s=0.1, restart_s=1.0, mtbf_s=3600)
    assert interval.steps is not None
    assert [step for step in range(1, 200) if interval.is_due(step)] == list(range(interval.steps, 200, interval.steps))


def test_a_fixed_one_is_as_it_is_said_and_none_is_never() -> None:
    assert [step for step in range(1, 10) if KeepInterval(3, None, "every").is_due(step)] == [3, 6, 9]
    assert not any(KeepInterval(None, None, "every").is_due(step) for step in range(10))


@pytest.mark.parametrize("every", [0, -1, 2.5, "often", True])
def test_other_intervals_are_refused(every: object) -> None:
    with pytest.raises(UsageError, match="every"):
        KeepInterval(every, None, "every")  # type: ignore[arg-type]


def test_measured_needs_to_know_how_often_the_job_fails() -> None:
    with pytest.raises(UsageError, match="mtbf_s"):
        KeepInterval("measured", None, "disk_every")
