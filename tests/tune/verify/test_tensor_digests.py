"""Marks stand in for tensors: same bits, same mark; and distances between marks are those between tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flatout.core.tensors.checksum import _weighted_sum
from flatout.tune.verify.tensor_digests import NUM_BUCKETS, digest_of, distance

SIZES = st.sampled_from([1, 7, NUM_BUCKETS, NUM_BUCKETS + 1, 3 * NUM_BUCKETS + 5, 200_000])


@given(SIZES, st.integers(0, 1000))
def test_equal_bits_have_equal_marks(size: int, seed: int) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    one, two = digest_of(tensor), digest_of(tensor.clone())
    assert (one.bits, one.norm, one.shape) == (two.bits, two.norm, two.shape)
    assert distance(one, two) == 0


@pytest.mark.slow
@given(SIZES, st.integers(0, 1000), st.sampled_from([1e-12, 1e-6, 1.0]))
def test_the_distance_of_marks_is_that_of_the_tensors(size: int, seed: int, scale: float) -> None:
    """Within eight standard deviations of the sketch, however close the tensors are."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(size, generator=generator, dtype=torch.float64)
    b = a + scale * torch.randn(size, generator=generator, dtype=torch.float64)
    exact = float(torch.linalg.vector_norm(a - b))
    spread = 0.0 if size <= NUM_BUCKETS else 8 * math.sqrt(0.5 / NUM_BUCKETS)
    assert distance(digest_of(a), digest_of(b)) == pytest.approx(exact, rel=spread + 1e-9)


def test_one_changed_bit_of_many_is_seen() -> None:
    tensor = torch.randn(100_000)
    other = tensor.clone()
    other[77_777] = torch.nextafter(other[77_777], torch.tensor(10.0))
    assert digest_of(tensor).bits != digest_of(other).bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool, torch.float16])
def test_every_dtype_has_a_mark(dtype: torch.dtype) -> None:
    tensor = torch.arange(10).to(dtype)
    assert digest_of(tensor).norm == pytest.approx(float(tensor.double().norm()))


def test_strides_do_not_count() -> None:
    tensor = torch.randn(6, 5)
    assert digest_of(tensor.t()).bits == digest_of(tensor.t().contiguous()).bits


def test_what_is_not_finite_is_infinitely_far() -> None:
    assert distance(digest_of(torch.ones(3)), digest_of(torch.tensor([1.0, math.nan, 1.0]))) == math.inf


def test_an_empty_tensor_has_a_mark() -> None:
    assert digest_of(torch.empty(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("num", [1, 7, 64, 100_003])
def test_checksums_made_on_a_device_tell_any_single_bit(num: int) -> None:
    data = torch.randint(0, 256, (num,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num))
    before = _weighted_sum(data)
    assert _weighted_sum(data.clone()) == before
    for place in (0, num // 2, num - 1):
        for bit in (1, 128):
            data[place] ^= bit
            assert _weighted_sum(data) != before
            data[place] ^= bit
    if num > 1:
        swapped = data.clone()
        swapped[0], swapped[1] = data[1].item(), data[0].item() ^ 1
        assert _weighted_sum(swapped) != before
