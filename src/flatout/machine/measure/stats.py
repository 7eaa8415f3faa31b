"""Statistics of timings: medians and intervals from order statistics, which assume no distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.core.errors import UsageError
from flatout.core.records.record import Record


class Estimate(Record, frozen=True, kw_only=True):
    """A median and its interval; `confidence` is the coverage reached, which small samples cap (n = 5: 0.94)."""

    value: float
    low: float
    high: float
    confidence: float
    num_samples: int


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones.

    >>> median([3.0, 1.0, 2.0, 10.0])
    2.5
    """
    return quantile(values, 0.5)


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the sample lies, linear between neighbours (R type 7, numpy's default).

    >>> quantile([0.0, 10.0], 0.25)
    2.5
    """
    if not values:
        raise UsageError("no values; a quantile needs at least one")
    if not 0 <= fraction <= 1:
        raise UsageError(f"fraction {fraction} is outside 0..1")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    # Between equal neighbours no arithmetic: rounding must not leave the sample's range.
    if ordered[below] == ordered[above]:
        return ordered[below]
    weight = position - below
    return min(max(ordered[below] * (1 - weight) + ordered[above] * weight, ordered[below]), ordered[above])


def relative_spread(values: Sequence[float]) -> float | None:
    """Interquartile range over median; None when the median is zero.

    >>> relative_spread([1.0, 2.0, 3.0, 4.0, 5.0])
    0.6666666666666666
    """
    middle = median(values)
    return None if middle == 0 else (quantile(values, 0.75) - quantile(values, 0.25)) / abs(middle)


def median_estimate(values: Sequence[float], *, confidence: float = 0.95) -> Estimate:
    """The median with a two-sided interval that holds for every continuous distribution.

    The number of independent samples below the true median is binomial(n, 1/2), so the k-th smallest and k-th largest
    value enclose it with probability 1 - 2 P(B < k) (David and Nagaraja, Order Statistics, 3rd ed., section 7.1).
    The narrowest such pair that reaches `confidence` is taken; where none does, the whole range with what it reaches.

    >>> median_estimate([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    Estimate(value=3.5, low=1.0, high=6.0, confidence=0.96875, num_samples=6)
    """
    if not 0 < confidence < 1:
        raise UsageError(f"confidence {confidence} is not between 0 and 1")
    middle = median(values)
    ordered = sorted(values)
    rank, coverage = _enclosing_rank(len(ordered), confidence)
    return Estimate(
        value=middle, low=ordered[rank], high=ordered[-1 - rank], confidence=coverage, num_samples=len(ordered)
    )


def ratio_estimate(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Median of the paired ratios with its interval (the sign test turned round).

    Pairs must have been measured next to each other: what slows the machine then slows both and cancels.

    >>> ratio_estimate([2.0, 4.0, 8.0], [1.0, 2.0, 4.0]).value
    2.0
    """
    if len(numerators) != len(denominators):
        raise UsageError(f"{len(numerators)} numerators and {len(denominators)} denominators are not pairs")
    if any(value <= 0 for value in denominators):
        raise UsageError("a denominator is not positive; a ratio of times needs times above the clock's resolution")
    return median_estimate([a / b for a, b in zip(numerators, denominators, strict=True)])


def _enclosing_rank(num_samples: int, confidence: float) -> tuple[int, float]:
    """Largest r such that the r-th value from either end (counted from 0) encloses the median, and the coverage."""
    whole = 2**num_samples
    term = below = 1  # binomial coefficient, and the sum of those so far: P(B <= rank) * whole
    rank, coverage = 0, 1 - 2 * (below / whole)
    for k in range(1, num_samples // 2):
        term = term * (num_samples - k + 1) // k
        below += term
        next_coverage = 1 - 2 * (below / whole)
        if next_coverage < confidence:
            break
        rank, coverage = k, next_coverage
    return rank, max(coverage, 0.0)


def batched_median_estimate(values: Sequence[float], *, num_batches: int = 20) -> Estimate | None:
    """The median of the medians of `num_batches` consecutive stretches; None for fewer than two values a stretch.

    Neighbours in a series of timings are alike (a busy neighbour, a clock that climbs), and order statistics of single values
    then promise too much. Medians of stretches that outlast such a spell are nearly independent (batch means: Law, Simulation
    Modeling and Analysis, 5th ed., section 9.5.3).
    """
    length = len(values) // num_batches
    if length < 2:
        return None
    start = len(values) - num_batches * length
    return median_estimate([median(values[i : i + length]) for i in range(start, len(values), length)])


def ratio_of_estimates(numerator: Estimate, denominator: Estimate) -> tuple[float, float, float]:
    """Ratio (value, low, high) of two independent estimates of the same confidence, all positive.

    The interval joins the two on the logarithm's scale by the distances of their ends (MOVER: Zou and Donner, Statistics in
    Medicine 27, 2008), so that turning the ratio round turns the interval round.
    """
    if min(numerator.low, denominator.low) <= 0:
        raise UsageError("a ratio of times needs times above 0")

    def up(estimate: Estimate) -> float:
        return math.log(estimate.high / estimate.value)

    def down(estimate: Estimate) -> float:
        return math.log(estimate.value / estimate.low)

    ratio = numerator.value / denominator.value
    low = ratio * math.exp(-math.hypot(down(numerator), up(denominator)))
    high = ratio * math.exp(math.hypot(up(numerator), down(denominator)))
    return ratio, low, high
