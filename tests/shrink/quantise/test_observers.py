"""Observers: which range they name for what they saw."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from flatout.core.errors import UsageError
from flatout.shrink.quantise.affine import for_range
from flatout.shrink.quantise.observers import Kind, RangeObserver


def normal(num: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def with_outlier() -> torch.Tensor:
    return torch.cat((normal(20_000), torch.tensor([100.0])))


def test_min_max_is_the_range_of_all_batches() -> None:
    found = RangeObserver("min-max")
    for batch in (torch.tensor([1.0, 2.0]), torch.tensor([-3.0])):
        found.observe(batch)
    assert [float(end) for end in found.range()] == [-3.0, 2.0]


def test_a_histogram_that_widens_counts_the_same_as_one_that_was_wide() -> None:
    small, large = normal(1000) * 1e-3, normal(1000, seed=1)
    one, other = RangeObserver(), RangeObserver()
    for x in (small, large):
        one.observe(x)
    other.observe(torch.cat((small, large)))
    assert one.limit == other.limit
    assert float(one.counts.sum()) == 2000
    assert float((one.counts.cumsum(0) - other.counts.cumsum(0)).abs().max()) <= 1000  # merged bins, no number lost
    assert torch.equal(one.counts, other.counts)


def test_percentile_clips_one_number_of_ten_thousand() -> None:
    x, found = normal(500_000), RangeObserver("percentile")
    found.observe(x)
    low, high = found.range()
    assert float(((x < low) | (x > high)).double().mean()) == pytest.approx(1e-4, abs=5e-5)


@pytest.mark.parametrize("kind", ["least-error", "entropy", "percentile"])
def test_one_outlier_does_not_take_all_the_bits(kind: Kind) -> None:
    found = RangeObserver(kind)
    found.observe(with_outlier())
    assert float(found.range()[1]) < 99  # the least error of 8 bits lies at 98


def test_least_error_is_no_worse_than_min_max() -> None:
    x, errors = with_outlier() + 0.5, []
    for found in (RangeObserver("least-error"), RangeObserver("min-max")):
        found.observe(x)
        errors.append(float((for_range(*found.range(), symmetric=False).fake_quantise(x) - x).square().sum()))
    assert errors[0] <= errors[1] * (1 + 1e-3)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_observer_names_more_than_it_saw(kind: Kind) -> None:
    found, x = RangeObserver(kind), normal(2000).clamp(min=-0.5)
    found.observe(x)
    low, high = found.range()
    assert float(x.min()) <= float(low) <= 0 <= float(high) <= float(x.max())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_zeros_alone_have_a_range_too(kind: Kind) -> None:
    found = RangeObserver(kind)
    found.observe(torch.zeros(10))
    assert float(for_range(*found.range()).fake_quantise(torch.tensor(0.0))) == 0


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_was_not_seen_has_no_range(kind: Kind) -> None:
    with pytest.raises(UsageError, match="seen nothing"):
        RangeObserver(kind).range()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_nan_is_refused(kind: Kind) -> None:
    with pytest.raises(UsageError, match="NaN"):
        RangeObserver(kind).observe(torch.tensor([float("nan")]))


def test_an_unknown_observer_is_refused() -> None:
    with pytest.raises(UsageError, match="'best'"):
        RangeObserver("best")  # type: ignore[arg-type]
