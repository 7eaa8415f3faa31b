from __future__ import annotations

from math import pi, sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.machine.cost.waiting import expected_largest, fit_line, waits

SECONDS = st.floats(0, 10)


@pytest.mark.slow
@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=20))
def test_in_each_call_one_rank_waits_for_nobody_and_none_longer_than_it_sat_there(
    rows: list[tuple[float, ...]],
) -> None:
    columns = {rank: [row[rank] for row in rows] for rank in range(3)}
    waited = waits(columns)
    for i, row in enumerate(rows):
        assert min(waited[rank][i] for rank in range(3)) == 0
        assert all(0 <= waited[rank][i] <= row[rank] for rank in range(3))


def test_a_constant_explains_nothing() -> None:
    assert fit_line([3.0, 3.0, 3.0], [1.0, 2.0, 3.0]).explained_fraction == 0
    assert fit_line([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]).slope == 0


def test_the_largest_of_few_is_known_in_closed_form() -> None:
    assert expected_largest(1) == pytest.approx(0, abs=1e-9)
    assert expected_largest(2) == pytest.approx(1 / sqrt(pi))
    assert expected_largest(3) == pytest.approx(1.5 / sqrt(pi))


def test_the_largest_of_many_is_what_drawing_gives() -> None:
    rng = Random(0)
    drawn = [max(rng.gauss(0, 1) for _ in range(64)) for _ in range(4000)]
    assert expected_largest(64) == pytest.approx(sum(drawn) / len(drawn), abs=0.03)
    assert expected_largest(16384) > expected_largest(1024) > expected_largest(64)
