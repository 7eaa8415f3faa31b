"""Ranks that wait for one another: what of a collective is transfer, how evenly work is shared, and the slowest of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import erf, sqrt
from statistics import fmean, median
from typing import Final, NamedTuple

from flatout.core.records.distributed import Distributed

_REACH: Final = 9.0
"""Deviations beyond which a normal law has nothing left for a double."""
_STEPS: Final = 4000


def waits(exposed_s: Mapping[int, Sequence[float]]) -> dict[int, list[float]]:
    """Seconds that each rank waited for the last one to arrive, call by call.

    A collective that all take part in ends for all at nearly the same moment, whoever came first; so the rank that sat in it
    shortest came last and waited for nobody, and its time is the transfer. No clock is compared with another.

    >>> waits({0: [5.0], 1: [2.0]})
    {0: [3.0], 1: [0.0]}
    """
    shortest = [min(column) for column in zip(*exposed_s.values(), strict=True)]
    return {rank: [t - s for t, s in zip(times, shortest, strict=True)] for rank, times in exposed_s.items()}


class FittedLine(NamedTuple):
    """The line y = base + slope * x, and the share of y's variance that it explains."""

    base: float
    slope: float
    explained_fraction: float

    def at(self, x: float) -> float:
        return self.base + self.slope * x


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> FittedLine:
    """The line through points with the least squares.

    >>> fit_line([0, 1, 2], [1, 3, 5])
    FittedLine(base=1.0, slope=2.0, explained_fraction=1.0)
    """
    mean_x, mean_y = fmean(xs), fmean(ys)
    spread_x = sum((x - mean_x) ** 2 for x in xs)
    spread_y = sum((y - mean_y) ** 2 for y in ys)
    common = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    if spread_x == 0 or spread_y == 0:
        return FittedLine(mean_y, 0.0, 0.0)
    slope = common / spread_x
    return FittedLine(mean_y - slope * mean_x, slope, common * common / (spread_x * spread_y))


class SlowGroup(NamedTuple):
    """A group of ranks that are slower than all others: in which share of the steps one of them is last, and by how many seconds
    in the median."""

    name: str
    ranks: tuple[int, ...]
    share: float
    extra_s: float


class Balance(NamedTuple):
    """Work and elements of the steps that all ranks know: `work_s[i]` holds those of step `steps[i]`, in the order of `ranks`.

    `line` is work as a function of elements, over all ranks and steps.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    work_s: tuple[tuple[float, ...], ...]
    elements: tuple[tuple[int, ...], ...]
    line: FittedLine

    @property
    def mean_work_s(self) -> tuple[float, ...]:
        """Mean own work of each rank."""
        return tuple(fmean(column) for column in zip(*self.work_s, strict=True))

    @property
    def saved_by_even_sizes(self) -> float:
        """Share of the longest rank's work, over all steps, that even sizes would save, as far as sizes explain work."""
        slope = max(0.0, self.line.slope)
        longest_s = sum(max(row) for row in self.work_s)
        return min(1.0, sum(slope * (max(n) - fmean(n)) for n in self.elements) / longest_s) if longest_s else 0.0

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank that is most often slowest beyond what its batch explains, and in which share of the steps."""
        counts = Counter(self.ranks[max(range(len(row)), key=row.__getitem__)] for row in self._beyond())
        rank, num = counts.most_common(1)[0]
        return rank, num / len(self.steps)

    def extra_s(self, rank: int) -> float:
        """Median over steps of this rank's work beyond the next slowest's, less what the sizes explain."""
        index = self.ranks.index(rank)
        return median(row[index] - max(w for i, w in enumerate(row) if i != index) for row in self._beyond())

    def slowest_group(self, group_of: Mapping[int, str]) -> SlowGroup | None:
        """The group of several ranks, such as those of a node, each of which works longer than each rank of all other groups, in
        the median over steps and beyond what its batch explains. None where there is none."""
        beyond = self._beyond()
        medians = {rank: median(row[index] for row in beyond) for index, rank in enumerate(self.ranks)}
        for group in dict.fromkeys(group_of[rank] for rank in self.ranks):
            inside = [index for index, rank in enumerate(self.ranks) if group_of[rank] == group]
            outside = [index for index, rank in enumerate(self.ranks) if group_of[rank] != group]
            if len(inside) < 2 or not outside:
                continue
            slower = min(medians[self.ranks[i]] for i in inside) > max(medians[self.ranks[i]] for i in outside)
            if not slower:
                continue
            ahead_s = [max(row[i] for i in inside) - max(row[i] for i in outside) for row in beyond]
            share = sum(s > 0 for s in ahead_s) / len(ahead_s)
            return SlowGroup(group, tuple(self.ranks[i] for i in inside), share, median(ahead_s))
        return None

    def _beyond(self) -> list[list[float]]:
        """Work less what its size adds to that of a mean batch."""
        # Sizes that follow the rank alone cannot be told from the rank; then the whole difference is charged to them.
        slope = max(0.0, self.line.slope) if self.line.explained_fraction > 0.1 else 0.0
        return [
            [w - slope * (n - fmean(sizes)) for w, n in zip(work, sizes, strict=True)]
            for work, sizes in zip(self.work_s, self.elements, strict=True)
        ]


def balance_of(distributed: Distributed | None) -> Balance | None:
    """The balance of a merged run; None when fewer than two ranks are known, or they have no step in common."""
    ranks = [r for r in distributed.ranks if r.step_numbers] if distributed is not None else []
    if len(ranks) < 2:
        return None
    tables = [dict(zip(r.step_numbers, zip(r.work_by_step, r.batch_elements, strict=True), strict=True)) for r in ranks]
    steps = sorted(set.intersection(*(set(t) for t in tables)))
    if not steps:
        return None
    work = tuple(tuple(t[n][0] for t in tables) for n in steps)
    elements = tuple(tuple(t[n][1] for t in tables) for n in steps)
    line = fit_line([float(n) for row in elements for n in row], [w for row in work for w in row])
    return Balance(tuple(r.rank for r in ranks), tuple(steps), work, elements, line)


@cache
def expected_largest(num: int) -> float:
    """The mean of the largest of `num` independent standard normal numbers, in deviations.

    The integral of 1 - P^n over the positive half less that of P^n over the negative one (David and Nagaraja, Order Statistics,
    2003, section 3.1), by the trapezoidal rule.

    >>> [round(expected_largest(n), 3) for n in (1, 2, 1024)]
    [0.0, 0.564, 3.248]
    """
    width = _REACH / _STEPS

    def below(x: float) -> float:
        return float((0.5 * (1 + erf(x / sqrt(2)))) ** num)

    inner = sum(1 - below(i * width) - below(-i * width) for i in range(1, _STEPS))
    return width * (inner + 0.5 * (1 - 2 * below(0.0)))
