from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.errors import UsageError
from flatout.machine.measure import stats

values = st.lists(st.floats(min_value=1e-9, max_value=1e9), min_size=1, max_size=60)


@given(values)
def test_median_agrees_with_the_standard_library(sample: list[float]) -> None:
    assert stats.median(sample) == pytest.approx(statistics.median(sample))


@given(values.filter(lambda sample: len(sample) > 1), st.integers(1, 3))
def test_quartiles_agree_with_the_standard_library(sample: list[float], quarter: int) -> None:
    expected = statistics.quantiles(sample, n=4, method="inclusive")[quarter - 1]
    assert stats.quantile(sample, quarter / 4) == pytest.approx(expected)


@given(values, st.floats(0, 1))
def test_a_quantile_lies_within_the_sample(sample: list[float], fraction: float) -> None:
    assert min(sample) <= stats.quantile(sample, fraction) <= max(sample)


@given(values)
def test_an_interval_encloses_its_median(sample: list[float]) -> None:
    estimate = stats.median_estimate(sample)
    assert min(sample) <= estimate.low <= estimate.value <= estimate.high <= max(sample)


@given(st.integers(1, 200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_coverage_reaches_the_confidence_wherever_the_range_does(num_samples: int, confidence: float) -> None:
    estimate = stats.median_estimate(list(range(num_samples)), confidence=confidence)
    whole_range = 1 - 2 * 0.5**num_samples
    assert estimate.confidence >= confidence or estimate.confidence == pytest.approx(whole_range)
    # The reached coverage is that of the ranks taken: P(low rank < B < high rank), B binomial(n, 1/2).
    rank = int(estimate.low)
    tail = sum(math.comb(num_samples, k) for k in range(rank + 1)) / 2**num_samples
    assert estimate.confidence == pytest.approx(max(0.0, 1 - 2 * tail))


def test_more_samples_narrow_the_interval() -> None:
    rng = random.Random(0)
    widths = []
    for num_samples in (10, 100, 1000):
        estimate = stats.median_estimate([rng.lognormvariate(0, 1) for _ in range(num_samples)])
        widths.append(estimate.high - estimate.low)
    assert widths == sorted(widths, reverse=True)


def test_the_interval_covers_the_true_median_as_often_as_it_says() -> None:
    rng = random.Random(1)
    trials = 2000
    hits = 0
    for _ in range(trials):
        estimate = stats.median_estimate([rng.expovariate(1.0) for _ in range(21)])
        hits += estimate.low <= math.log(2) <= estimate.high
    # The reached coverage is 0.973; 4 standard errors of 2000 trials are 0.014.
    assert hits / trials == pytest.approx(estimate.confidence, abs=0.015)


@given(values, st.floats(0.1, 10))
def test_a_constant_ratio_is_found_whatever_the_drift(sample: list[float], ratio: float) -> None:
    estimate = stats.ratio_estimate([ratio * value for value in sample], sample)
    assert estimate.value == pytest.approx(ratio)
    assert estimate.low == pytest.approx(estimate.high)


def test_spread_of_a_zero_median_is_unknown() -> None:
    assert stats.relative_spread([0.0, 0.0, 1.0]) is None


def test_impossible_samples_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one"):
        stats.median([])
    with pytest.raises(UsageError, match="not pairs"):
        stats.ratio_estimate([1.0], [1.0, 2.0])
    with pytest.raises(UsageError, match="not positive"):
        stats.ratio_estimate([1.0], [0.0])
    with pytest.raises(UsageError, match="outside"):
        stats.quantile([1.0], 2.0)
    with pytest.raises(UsageError, match="between"):
        stats.median_estimate([1.0], confidence=1.0)
