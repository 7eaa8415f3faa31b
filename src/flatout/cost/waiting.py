"""Ranks that wait for one another: what of an exposed collective is transfer, and how work follows from batch sizes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple


def waits(exposed_s: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """By rank, how long it waited for the last rank to arrive, call by call.

    A collective that all take part in ends for all at nearly the same moment, whoever came first; so the rank that sat in it
    shortest came last and waited for nobody, and its time is the transfer. No clock is compared with another.

    >>> waits({0: [5.0], 1: [2.0]})
    {0: [3.0], 1: [0.0]}
    """
    shortest = [min(column) for column in zip(*exposed_s.values(), strict=True)]
    return {rank: [t - s for t, s in zip(times, shortest, strict=True)] for rank, times in exposed_s.items()}


class Line(NamedTuple):
    """y = base + slope * x, and the share of y's variance that it explains."""

    base: float
    slope: float
    explained_fraction: float

    def at(self, x: float) -> float:
        return self.base + self.slope * x


def fit(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares.

    >>> fit([0, 1, 2], [1, 3, 5])
    Line(base=1.0, slope=2.0, explained_fraction=1.0)
    """
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread_x = sum((x - mean_x) ** 2 for x in xs)
    spread_y = sum((y - mean_y) ** 2 for y in ys)
    common = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    if spread_x == 0 or spread_y == 0:
        return Line(mean_y, 0.0, 0.0)
    slope = common / spread_x
    return Line(mean_y - slope * mean_x, slope, common * common / (spread_x * spread_y))
