"""Observers: which range they name for what they saw."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from flatout.compression.quantising.affine import for_range
from flatout.compression.quantising.observers import Entropy, Histogram, Kind, LeastError, MinMax, Percentile, observer
from flatout.errors import UsageError


def normal(num: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def with_outlier() -> torch.Tensor:
    return torch.cat((normal(20_000), torch.tensor([100.0])))


def test_min_max_is_the_range_of_all_batches() -> None:
    found = MinMax()
    for batch in (torch.tensor([1.0, 2.0]), torch.tensor([-3.0])):
        found.see(batch)
    assert [float(end) for end in found.range()] == [-3.0, 2.0]


def test_min_max_of_channels_has_a_range_for_each() -> None:
    found = MinMax(dim=1)
    found.see(torch.tensor([[1.0, -5.0], [2.0, 4.0]]))
    low, high = found.range()
    assert (low.tolist(), high.tolist()) == ([1.0, -5.0], [2.0, 4.0])


def test_a_histogram_that_widens_counts_the_same_as_one_that_was_wide() -> None:
    small, large = normal(1000) * 1e-3, normal(1000, seed=1)
    one, other = Histogram(), Histogram()
    for x in (small, large):
        one.see(x)
    other.see(torch.cat((small, large)))
    assert one.limit == other.limit
    assert float(one.counts.sum()) == 2000
    assert float((one.counts.cumsum(0) - other.counts.cumsum(0)).abs().max()) <= 1000  # merged bins, no number lost
    assert torch.equal(one.counts, other.counts)


@pytest.mark.parametrize("kept", [0.9, 0.99])
def test_percentile_keeps_the_fraction_that_it_is_told(kept: float) -> None:
    x, found = normal(50_000), Percentile(kept)
    found.see(x)
    low, high = found.range()
    assert float(((x >= low) & (x <= high)).double().mean()) == pytest.approx(kept, abs=0.005)


@pytest.mark.parametrize("make", [LeastError, Entropy, lambda: Percentile(0.999)])
def test_one_outlier_does_not_take_all_the_bits(make: type[LeastError]) -> None:
    found = make()
    found.see(with_outlier())
    assert float(found.range()[1]) < 95  # the least error of 8 bits lies at 91


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_least_error_is_no_worse_than_min_max(bits: int, symmetric: bool) -> None:
    x = with_outlier() + 0.5
    errors = []
    for found in (LeastError(bits=bits, symmetric=symmetric), MinMax()):
        found.see(x)
        errors.append(float((for_range(*found.range(), bits=bits, symmetric=symmetric).rounded(x) - x).square().sum()))
    assert errors[0] <= errors[1] * (1 + 1e-3)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_observer_names_more_than_it_saw(kind: Kind) -> None:
    found, x = observer(kind), normal(2000).clamp(min=-0.5)
    found.see(x)
    low, high = found.range()
    assert float(x.min()) <= float(low) <= 0 <= float(high) <= float(x.max())


@pytest.mark.parametrize("kind", get_args(Kind))
def test_zeros_alone_have_a_range_too(kind: Kind) -> None:
    found = observer(kind)
    found.see(torch.zeros(10))
    assert float(for_range(*found.range()).rounded(torch.tensor(0.0))) == 0


@pytest.mark.parametrize("kind", get_args(Kind))
def test_what_was_not_seen_has_no_range(kind: Kind) -> None:
    with pytest.raises(UsageError, match="seen nothing"):
        observer(kind).range()


@pytest.mark.parametrize("kind", get_args(Kind))
def test_nan_is_refused(kind: Kind) -> None:
    with pytest.raises(UsageError, match="NaN"):
        observer(kind).see(torch.tensor([float("nan")]))


def test_an_unknown_observer_is_refused() -> None:
    with pytest.raises(UsageError, match="'best'"):
        observer("best")  # type: ignore[arg-type]
