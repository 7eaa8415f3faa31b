from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.check.traces.intervals import Cover, gaps, intervals_without, length, shared, union_of_intervals

interval = st.tuples(st.integers(0, 60), st.integers(0, 60))
intervals = st.lists(interval, max_size=12)


def points(cover: list[tuple[int, int]]) -> set[int]:
    return {x for start, end in cover for x in range(start, end)}


@pytest.mark.slow
@given(intervals)
def test_a_union_covers_the_same_points_once_and_in_order(some: list[tuple[int, int]]) -> None:
    cover = union_of_intervals(some)
    assert points(cover) == points(some)
    assert length(cover) == len(points(some))
    assert all(a[1] < b[0] for a, b in pairwise(cover))


@pytest.mark.slow
@given(intervals, st.integers(0, 60), st.integers(0, 60))
def test_covered_time_and_gaps_add_up_to_the_span(some: list[tuple[int, int]], a: int, b: int) -> None:
    start, end = min(a, b), max(a, b)
    cover = union_of_intervals(some)
    between = gaps(cover, start, end)
    assert points(between) == set(range(start, end)) - points(cover)
    assert length(between) + length(shared(cover, union_of_intervals([(start, end)]))) == end - start


@pytest.mark.slow
@given(intervals, intervals)
def test_what_is_shared_and_what_is_not_add_up(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> None:
    a, b = union_of_intervals(some), union_of_intervals(others)
    assert points(shared(a, b)) == points(a) & points(b)
    assert points(intervals_without(a, b)) == points(a) - points(b)
    assert length(shared(a, b)) + length(intervals_without(a, b)) == length(a)


@given(intervals, interval)
def test_a_ready_cover_answers_as_a_union_does(some: list[tuple[int, int]], one: tuple[int, int]) -> None:
    start, end = min(one), max(one)
    assert Cover(some).within(start, end) == length(
        shared(union_of_intervals(some), union_of_intervals([(start, end)]))
    )
