from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flatout.cost.waiting import fit, waits

SECONDS = st.floats(0, 10)


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
    assert fit([3.0, 3.0, 3.0], [1.0, 2.0, 3.0]).explained_fraction == 0
    assert fit([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]).slope == 0
