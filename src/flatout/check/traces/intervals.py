"""Sets of intervals on a time axis: unions, what they share, what lies between. Integers (nanoseconds), half open.

A cover is a list of disjoint intervals in ascending order, none of them empty; `union_of_intervals` makes one of any intervals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]


def union_of_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The cover of any intervals; empty and backward ones count for nothing.

    >>> union_of_intervals([(2, 6), (0, 4), (10, 11), (11, 12)])
    [(0, 6), (10, 12)]
    """
    cover: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if cover and start <= cover[-1][1]:
            if end > cover[-1][1]:
                cover[-1] = (cover[-1][0], end)
        else:
            cover.append((start, end))
    return cover


def length(cover: Iterable[Interval]) -> int:
    """How much of the axis a cover takes."""
    return sum(end - start for start, end in cover)


def shared(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The cover of what lies in both covers.

    >>> shared([(0, 6), (8, 12)], [(4, 9)])
    [(4, 6), (8, 9)]
    """
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def gaps(cover: list[Interval], start: int, end: int) -> list[Interval]:
    """The cover of what lies between `start` and `end` and not in `cover`.

    >>> gaps([(2, 4), (6, 7)], 0, 8)
    [(0, 2), (4, 6), (7, 8)]
    """
    between: list[Interval] = []
    at = start
    for a, b in cover:
        if b <= start:
            continue
        if a >= end:
            break
        if a > at:
            between.append((at, a))
        at = max(at, b)
    if at < end:
        between.append((at, end))
    return between


def intervals_without(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """The cover of what lies in cover `a` and not in cover `b`.

    >>> intervals_without([(0, 10)], [(2, 4), (9, 12)])
    [(0, 2), (4, 9)]
    """
    return shared(a, gaps(b, a[0][0], a[-1][1])) if a else []


class Cover:
    """A cover indexed for many look-ups: how much of an interval does it take? Each costs a binary search."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.intervals = union_of_intervals(intervals)
        self._starts = [start for start, _ in self.intervals]
        self._before = [0]
        for start, end in self.intervals:
            self._before.append(self._before[-1] + end - start)

    def within(self, start: int, end: int) -> int:
        """How much of the interval from `start` to `end` is covered."""
        return max(0, self._up_to(end) - self._up_to(start))

    def _up_to(self, at: int) -> int:
        """Length of the cover before `at`."""
        index = bisect_right(self._starts, at)
        if index == 0:
            return 0
        start, end = self.intervals[index - 1]
        return self._before[index - 1] + min(at, end) - start
