"""The affine transformation: how far it moves numbers, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.compression.quantising import affine
from flatout.compression.quantising.affine import Affine, for_range
from flatout.errors import UsageError

BITS = st.integers(2, 8)
VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40).map(
    lambda v: torch.tensor(v, dtype=torch.float64)
)


def half_a_step(by: Affine) -> Tensor:
    return by.scale / 2 * (1 + 1e-9)


@given(VALUES, BITS, st.booleans())
def test_no_number_inside_the_range_moves_by_more_than_half_a_step(x: Tensor, bits: int, symmetric: bool) -> None:
    by = affine.per_tensor(x, bits=bits, symmetric=symmetric)
    assert bool(((by.rounded(x) - x).abs() <= half_a_step(by)).all())


@given(VALUES, BITS, st.booleans())
def test_order_is_kept(x: Tensor, bits: int, symmetric: bool) -> None:
    by = affine.per_tensor(x, bits=bits, symmetric=symmetric)
    assert bool((by.whole(x.sort().values).diff() >= 0).all())


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), BITS, st.booleans())
def test_zero_is_exact_in_every_range(low: float, width: float, bits: int, symmetric: bool) -> None:
    by = for_range(torch.tensor(low), torch.tensor(low + width), bits=bits, symmetric=symmetric)
    assert float(by.rounded(torch.tensor(0.0))) == 0.0


@given(VALUES, BITS, st.booleans())
def test_whole_numbers_stay_within_their_bits(x: Tensor, bits: int, symmetric: bool) -> None:
    low, high = affine.limits(bits, symmetric=symmetric)
    whole = affine.per_tensor(x[:1], bits=bits, symmetric=symmetric).whole(x)
    assert int(whole.min()) >= low
    assert int(whole.max()) <= high


@given(VALUES, BITS, st.booleans())
def test_rounding_twice_is_rounding_once(x: Tensor, bits: int, symmetric: bool) -> None:
    by = affine.per_tensor(x, bits=bits, symmetric=symmetric)
    assert torch.equal(by.rounded(by.rounded(x)), by.rounded(x))


def test_channels_are_no_worse_than_the_whole_and_groups_no_worse_than_channels() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 8)[:, None]
    whole, channels = affine.per_tensor(x, bits=4), affine.per_channel(x, bits=4)
    groups = affine.per_group(x, group=16)
    in_groups = groups.rounded(affine.grouped(x, group=16)).view(8, 64)
    errors = [float((y - x).norm()) for y in (whole.rounded(x), channels.rounded(x), in_groups)]
    assert errors == sorted(errors, reverse=True)


def test_a_channel_of_zeros_stays_zero() -> None:
    x = torch.zeros(3, 5)
    assert torch.equal(affine.per_channel(x).rounded(x), x)


@pytest.mark.parametrize(("low", "high"), [(1.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_range_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="range"):
        for_range(torch.tensor(low), torch.tensor(high))


def test_bits_beyond_what_is_made_are_refused() -> None:
    with pytest.raises(UsageError, match="17 bits"):
        affine.limits(17, symmetric=True)
