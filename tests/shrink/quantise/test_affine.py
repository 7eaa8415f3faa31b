"""The affine transformation: how far it moves numbers, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout.core.errors import UsageError
from flatout.shrink.quantise import affine
from flatout.shrink.quantise.affine import Affine, for_range

VALUES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40).map(
    lambda v: torch.tensor(v, dtype=torch.float64)
)


def over_all(x: Tensor, symmetric: bool) -> Affine:
    return for_range(x.amin(), x.amax(), symmetric=symmetric)


def half_a_step(by: Affine) -> Tensor:
    return by.scale / 2 * (1 + 1e-9)


@given(VALUES, st.booleans())
def test_no_number_inside_the_range_moves_by_more_than_half_a_step(x: Tensor, symmetric: bool) -> None:
    by = over_all(x, symmetric)
    assert bool(((by.fake_quantise(x) - x).abs() <= half_a_step(by)).all())


@given(VALUES, st.booleans())
def test_order_is_kept(x: Tensor, symmetric: bool) -> None:
    by = over_all(x, symmetric)
    assert bool((by.quantise(x.sort().values).diff() >= 0).all())


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6), st.booleans())
def test_zero_is_exact_in_every_range(low: float, width: float, symmetric: bool) -> None:
    by = for_range(torch.tensor(low), torch.tensor(low + width), symmetric=symmetric)
    assert float(by.fake_quantise(torch.tensor(0.0))) == 0.0


@given(VALUES, st.booleans())
def test_whole_numbers_stay_within_their_bits(x: Tensor, symmetric: bool) -> None:
    whole = over_all(x[:1], symmetric).quantise(x)
    assert int(whole.min()) >= (-127 if symmetric else -128)
    assert int(whole.max()) <= 127


@given(VALUES, st.booleans())
def test_rounding_twice_is_rounding_once(x: Tensor, symmetric: bool) -> None:
    by = over_all(x, symmetric)
    assert torch.equal(by.fake_quantise(by.fake_quantise(x)), by.fake_quantise(x))


def test_channels_are_no_worse_than_the_whole() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 8)[:, None]
    whole, channels = (float((by.fake_quantise(x) - x).norm()) for by in (over_all(x, True), affine.per_channel(x)))
    assert channels <= whole


def test_a_channel_of_zeros_stays_zero() -> None:
    x = torch.zeros(3, 5)
    assert torch.equal(affine.per_channel(x).fake_quantise(x), x)


@pytest.mark.parametrize(("low", "high"), [(1.0, -1.0), (float("nan"), 1.0), (0.0, float("inf"))])
def test_a_range_that_is_none_is_refused(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="range"):
        for_range(torch.tensor(low), torch.tensor(high))
