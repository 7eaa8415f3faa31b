"""Samples of different lengths shared out to ranks: what a sample costs, who takes which, and what a plan is worth. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import fsum
from statistics import fmean
from typing import NamedTuple

from flatout.core.errors import UsageError


class SampleCost(NamedTuple):
    """What a sample of L tokens costs: `token` * L + `pair` * L^2, in any unit; only ratios count.

    The square is attention's: all pairs of tokens. What is not quadratic in a model (convolutions, recurrences, tables) has
    `pair` 0.
    """

    token: float = 1.0
    pair: float = 0.0

    def of(self, length: int) -> float:
        """The cost of one sample.

        >>> SampleCost(1.0, 0.5).of(4)
        12.0
        """
        return self.token * length + self.pair * length * length


def transformer_cost(width: int) -> SampleCost:
    """The cost by FLOP of a plain transformer: L + L^2 / (6 * width).

    A layer's products take 24 * width^2 FLOP a token and its attention 4 * width * L (Narayanan et al. 2021, appendix).

    >>> transformer_cost(768).of(4608)
    9216.0
    """
    return SampleCost(1.0, 1.0 / (6 * width))


def fitted_cost(lengths: Sequence[int], seconds: Sequence[float]) -> SampleCost:
    """The cost by least squares through the origin, of the time that samples (or rows) of these lengths took.

    A negative coefficient becomes 0 and the other is fitted alone. Raises UsageError with fewer than two different lengths.
    """
    if len(set(lengths)) < 2:
        raise UsageError(
            f"{len(set(lengths))} different lengths were timed; two at least tell tokens from pairs of tokens"
        )
    xx = fsum(n**2 for n in lengths)
    xy = fsum(n**3 for n in lengths)
    yy = fsum(n**4 for n in lengths)
    xs = fsum(n * s for n, s in zip(lengths, seconds, strict=True))
    ys = fsum(n * n * s for n, s in zip(lengths, seconds, strict=True))
    determinant = xx * yy - xy * xy
    token, pair = (xs * yy - ys * xy) / determinant, (ys * xx - xs * xy) / determinant
    if token < 0:
        return SampleCost(0.0, ys / yy)
    return SampleCost(token, pair) if pair >= 0 else SampleCost(xs / xx, 0.0)


def longest_first(costs: Sequence[float], num_ranks: int, *, fewest: int = 1) -> list[list[int]]:
    """Indices of the samples of each rank: the costliest first, each to the rank with least so far; then exchanges.

    Each rank gets `fewest` samples at least; there must be so many. Longest-first is within 4/3 of the best (Graham 1969).

    >>> longest_first([5.0, 4.0, 3.0, 3.0, 3.0], 2)
    [[0, 1], [3, 2, 4]]
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0.0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, rank = loads[0]
        shares[rank].append(index)
        heapq.heapreplace(loads, (load + costs[index], rank))
    for share in shares:
        while len(share) < fewest:
            share.append(max(shares, key=len).pop())  # its cheapest
    _exchange(costs, shares)
    return shares


def _exchange(costs: Sequence[float], shares: list[list[int]]) -> None:
    """Swap two samples of the ranks with most and least while that brings the most down."""
    loads = [fsum(costs[i] for i in share) for share in shares]
    for _ in range(2 * len(shares)):
        most, least = max(range(len(loads)), key=loads.__getitem__), min(range(len(loads)), key=loads.__getitem__)
        gap = loads[most] - loads[least]
        best, best_swap = 0.0, None
        for a, one in enumerate(shares[most]):
            for b, other in enumerate(shares[least]):
                moved = costs[one] - costs[other]
                if 0 < moved < gap and min(moved, gap - moved) > best:
                    best, best_swap = min(moved, gap - moved), (a, b, moved)
        if best_swap is None or best < 1e-3 * loads[most]:
            return
        a, b, moved = best_swap
        shares[most][a], shares[least][b] = shares[least][b], shares[most][a]
        loads[most] -= moved
        loads[least] += moved


def idle_fraction(rank_costs: Sequence[Sequence[float]]) -> float:
    """Share of the ranks' time that goes by at the barrier, where each row holds the ranks' costs of one optimizer step.

    >>> idle_fraction([[4.0, 2.0]])
    0.25
    """
    longest = fsum(max(row) for row in rank_costs)
    return 1 - fsum(fmean(row) for row in rank_costs) / longest if longest else 0.0


def variance_inflation(batches: Sequence[Sequence[int]]) -> float:
    """How much more the mean length of a batch varies than in batches drawn uniformly: the noise that batching by length adds.

    1 for a uniform shuffle, by expectation; above, batches differ in what they hold, and gradients with them. It is the factor of
    the variance for a gradient that follows the length, the worst case of a plan that looks at nothing else.
    """
    lengths = [n for batch in batches for n in batch]
    mean = fmean(lengths)
    variance = fsum((n - mean) ** 2 for n in lengths) / len(lengths)
    if len(batches) < 2 or not variance:
        return 1.0
    between = fsum(len(batch) * (fmean(batch) - mean) ** 2 for batch in batches) / (len(batches) - 1)
    return between / (variance * len(lengths) / (len(lengths) - 1))
