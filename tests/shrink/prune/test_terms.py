"""Terms: ties are conditions that are enough, never too few."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.shrink.prune.shapes import reshaped_units
from flatout.shrink.prune.terms import PINNED, UnitTerms


def test_a_split_dimension_goes_by_rows_or_by_columns() -> None:
    terms = UnitTerms()
    dim = terms.fresh(6)
    rows, columns = terms.split(dim, (2, 3))

    assert terms.remaining(dim, terms.variables(rows[:1])) == [3, 4, 5]
    assert terms.remaining(dim, terms.variables(columns[1:2])) == [0, 2, 3, 5]
    assert terms.split(dim, (2, 3)) == [rows, columns]


def test_pinning_one_unit_pins_what_is_tied_to_it() -> None:
    terms = UnitTerms()
    a, b = terms.fresh(4), terms.fresh(4)
    terms.tie(a, b)
    terms.pin(a[1:2], "why")

    assert [terms.resolve(term) == PINNED for term in b] == [False, True, False, False]
    assert "why" in terms.because.values()


def test_equal_parts_lose_the_same_units() -> None:
    terms = UnitTerms()
    dim = terms.fresh(6)
    first = terms.tie_inside(dim, 3)

    assert terms.remaining(dim, terms.variables(first[:1])) == [1, 3, 5]


@pytest.mark.slow
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3),
    ties=st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), max_size=6),
    gone=st.sets(st.integers(0, 400), max_size=40),
)
def test_a_view_keeps_what_its_origin_keeps(sizes: list[int], ties: list[tuple[int, int]], gone: set[int]) -> None:
    """Whatever is tied and whatever goes, the elements left of a view are the elements left of what it shows."""
    terms = UnitTerms()
    dims = [terms.fresh(size) for size in sizes]
    num = 1
    for size in sizes:
        num *= size
    for new in ((num,), (1, num), (num // 2, 2) if num % 2 == 0 else (num,), (2, num // 2) if num % 2 == 0 else (num,)):
        out = reshaped_units(terms, dims, new)
        for a, b in ties:
            one, other = out[0], out[-1]
            terms.tie([one[a % len(one)]], [other[b % len(other)]])
        removed = {v for dim in (*dims, *out) for v in terms.variables(dim)} & gone
        elements = terms.remaining(terms.merge(dims), removed)

        assert terms.remaining(terms.merge(out), removed) == elements
        assert [len(dim) for dim in out] == list(new)
