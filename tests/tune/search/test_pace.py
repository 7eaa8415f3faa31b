"""How long a search expects what comes next to take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.tune.search.pace import Pace, guessed_start_s
from flatout.tune.search.script_search import _num_compared

SECONDS = st.floats(0.1, 1e3)


def test_what_judges_others_runs_once_for_the_trials_and_once_for_the_final_proof() -> None:
    pace = Pace()
    pace.add(67.0, 1.0, judged_s=46.0)
    assert pace.needed_s(2.0) == 2 * 21 + 1.5 * 21 + 46
    pace.add(45.0, 3.0)
    assert pace.needed_s(2.0) == 2 * 18 + 1.5 * 21 + 46


def test_the_effort_is_in_starting_and_not_in_racing() -> None:
    pace = Pace()
    pace.add(25.0, 1.0, raced_s=20.0)
    assert pace.needed_s(5.0) == 5 * 5 + 20 + 1.5 * 5 + 0.5 * 20


@given(st.lists(st.tuples(SECONDS, st.sampled_from([1.0, 3.0, 5.0]))), st.floats(1.0, 10.0))
def test_more_effort_takes_longer_and_the_final_proof_is_never_forgotten(
    took: list[tuple[float, float]], effort: float
) -> None:
    pace = Pace()
    for seconds, of_effort in took:
        pace.add(seconds, of_effort)
    assert pace.needed_s(effort + 1) > pace.needed_s(effort)
    assert pace.needed_s(effort) > max((seconds / of_effort for seconds, of_effort in took), default=0.0)


@pytest.mark.parametrize(
    ("step_s", "budget_s", "num"), [(0.01, 120.0, 8), (0.3, 120.0, 7), (0.75, 120.0, 4), (0.75, 600.0, 8)]
)
def test_long_steps_are_compared_over_fewer_of_them(step_s: float, budget_s: float, num: int) -> None:
    assert _num_compared(8, step_s, budget_s) == num
    assert _num_compared(2, step_s, budget_s) == 2


def test_before_a_comparison_was_made_long_steps_make_the_guess_longer() -> None:
    quick, slow = Pace(10.0), Pace(70.0)
    assert slow.needed_s(1.0) == pytest.approx(7 * quick.needed_s(1.0))
    assert quick.all_s([1.0, 1.0]) == pytest.approx(2 * 10.0 + quick.final_s())
    quick.add(30.0, 1.0, raced_s=5.0)
    assert quick.all_s([1.0, 1.0]) == pytest.approx(2 * 30.0 + quick.final_s())


def test_a_script_that_compiles_is_expected_to_start_later_by_what_it_compiles() -> None:
    quick = guessed_start_s(True, num_steps=8, step_s=0.1, compile_s=0.0)
    slow = guessed_start_s(True, num_steps=8, step_s=0.1, compile_s=20.0)
    assert slow - quick == pytest.approx(2 * 20.0)
    assert quick > guessed_start_s(False, num_steps=8, step_s=0.1, compile_s=0.0)
    assert quick > guessed_start_s(True, num_steps=4, step_s=0.1, compile_s=0.0)


def test_before_a_comparison_was_made_each_is_expected_to_race_as_long_as_it_may() -> None:
    pace = Pace(10.0, 15.0)
    assert pace.final_s() == pytest.approx(1.5 * 10 + 0.5 * 15)
    assert pace.needed_s(2.0) == pytest.approx(2 * 10 + 15 + pace.final_s())
    assert pace.all_s([1.0, 2.0]) == pytest.approx(3 * 10 + 2 * 15 + pace.final_s())


def test_a_final_proof_with_the_processes_of_a_trial_takes_less() -> None:
    pace = Pace()
    assert not pace.is_known
    pace.add(70.0, 1.0, judged_s=20.0, raced_s=30.0)
    assert pace.is_known
    assert pace.least_final_s() == 20 + 0.5 * 30 + 20 < pace.needed_s(0.0)
