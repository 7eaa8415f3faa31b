"""Intervals of means of scores, one score a held sample: shares by Wilson, paired differences of shares by Newcombe."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Final

from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import Interval

_CONFIDENCE: Final = 0.95
_Z: Final = NormalDist().inv_cdf((1 + _CONFIDENCE) / 2)
_FEWEST: Final = 30
"""Samples of a mean whose interval is that of a normal distribution: the usual rule of thumb for the central limit."""


def mean_interval(scores: Sequence[float]) -> Interval:
    """95 % interval of the mean of scores: Wilson's where all are 0 or 1, else by the normal distribution.

    Raises UsageError for no scores, for fewer than 30 that are not all 0 or 1, and for one that is not finite.

    >>> found = mean_interval([1.0] * 9 + [0.0])
    >>> round(found.low, 3), round(found.high, 3), found.method
    (0.596, 0.982, 'Wilson')
    """
    _check(scores)
    if not _is_binary(scores):
        return _normal(scores, method="normal")
    mean = fmean(scores)
    return _interval(mean, *_wilson(mean, len(scores)), len(scores), "Wilson")


def paired_difference(scores: Sequence[float], others: Sequence[float]) -> Interval:
    """95 % interval of the mean of `scores` less that of `others`, both of the same samples in the same order.

    Where all are 0 or 1: method 10 of Newcombe, Statistics in Medicine 17, 1998, pp. 2635-2650, whose interval keeps its
    coverage near 0 and 1, where accuracies lie. Else the normal distribution of the mean of the differences. Raises UsageError as
    `mean_interval` does, and for lists of unequal length.

    >>> paired_difference([1.0] * 50, [1.0] * 49 + [0.0]).value
    0.02
    """
    if len(scores) != len(others):
        raise UsageError(f"{len(scores)} scores and {len(others)} are no pairs; judge both by the same samples")
    _check(scores)
    _check(others)
    if not (_is_binary(scores) and _is_binary(others)):
        differences = [a - b for a, b in zip(scores, others, strict=True)]
        return _normal(differences, method="normal, paired")
    value = (math.fsum(scores) - math.fsum(others)) / len(scores)
    return _interval(value, *_newcombe(scores, others), len(scores), "Newcombe, paired")


def _interval(value: float, low: float, high: float, num: int, method: str) -> Interval:
    return Interval(value=value, low=low, high=high, confidence=_CONFIDENCE, num_samples=num, method=method)


def _newcombe(scores: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    num = len(scores)
    both = sum(a == b == 1 for a, b in zip(scores, others, strict=True))
    first, second = int(math.fsum(scores)) - both, int(math.fsum(others)) - both
    neither = num - both - first - second
    p, q = (both + first) / num, (both + second) / num
    (p_low, p_high), (q_low, q_high) = _wilson(p, num), _wilson(q, num)
    phi = _correlation(both, first, second, neither)

    def width(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    return p - q - width(p - p_low, q_high - q), p - q + width(p_high - p, q - q_low)


def _correlation(both: int, first: int, second: int, neither: int) -> float:
    """Phi, with Newcombe's continuity correction; 0 where a margin is empty."""
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    if margins == 0:
        return 0.0
    cross, half = both * neither - first * second, (both + first + second + neither) / 2
    return (max(cross - half, 0.0) if cross > 0 else cross) / math.sqrt(margins)


def _wilson(share: float, num: int) -> tuple[float, float]:
    """Wilson, Journal of the American Statistical Association 22, 1927."""
    z = _Z
    centre = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return min(max(0.0, centre - half), share), max(min(1.0, centre + half), share)


def _normal(values: Sequence[float], *, method: str) -> Interval:
    num = len(values)
    if num < _FEWEST:
        raise UsageError(f"{num} samples are too few for an interval of their mean; give {_FEWEST} or more")
    mean = fmean(values)
    half = _Z * stdev(values, mean) / math.sqrt(num)
    return _interval(mean, mean - half, mean + half, num, method)


def _is_binary(scores: Sequence[float]) -> bool:
    return all(score in (0.0, 1.0) for score in scores)


def _check(scores: Sequence[float]) -> None:
    if not scores:
        raise UsageError("no scores; give one number for each held sample")
    if not all(map(math.isfinite, scores)):
        raise UsageError("a score is not finite; look at the model's outputs for that sample")
