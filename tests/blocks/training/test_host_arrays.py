"""Tensors as arrays: shared memory on a CPU, the same float32 arithmetic, and no gradients lost without a word."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout import UsageError, as_arrays

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def advantages_of(rewards: Tensor, values: Tensor, dones: Tensor, last: Tensor) -> Tensor:
    found, running = torch.zeros_like(rewards), torch.zeros_like(last)
    for t in reversed(range(len(rewards))):
        going, after = (1.0 - dones[t + 1], values[t + 1]) if t + 1 < len(rewards) else (1.0, last)
        delta = rewards[t] + 0.99 * after * going - values[t]
        found[t] = running = delta + 0.99 * 0.95 * going * running
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(40,), (40, 3)])
def test_float32_is_computed_bit_for_bit_as_with_tensors(device: str, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(shape, device=device), torch.randn(shape, device=device)
    dones, last = (torch.rand(shape, device=device) < 0.1).float(), torch.randn(shape[1:], device=device)
    expected, found = advantages_of(rewards, values, dones, last), torch.zeros_like(rewards)
    with as_arrays(rewards, values, dones, last, into=(found,)) as (r, v, d, after_last, out):
        running = 0.0
        for t in reversed(range(len(r))):
            going, after = (1.0 - d[t + 1], v[t + 1]) if t + 1 < len(r) else (1.0, after_last)
            delta = r[t] + 0.99 * after * going - v[t]
            out[t] = running = delta + 0.99 * 0.95 * going * running
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_arrays_of_a_cpu_share_memory_and_numbers_pass(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers)
    with as_arrays(2, 0.5, None, into=(tensor,)) as (two, half, nothing, array):
        array[0] = 7
        assert (two, half, nothing) == (2, 0.5, None)
    assert tensor[0] == 7


def test_a_division_by_zero_goes_by_without_a_word_as_with_tensors() -> None:
    zero = torch.zeros(2)
    with as_arrays(torch.ones(2), into=(zero,)) as (one, array):
        array[:] = one / array
    assert zero.isinf().all()


def test_gradients_and_formats_that_would_be_lost_are_errors() -> None:
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(UsageError, match="gradients"), as_arrays(weight):
        pass
    with torch.no_grad(), as_arrays(weight) as (array,):
        assert array.sum() == 3
    with pytest.raises(UsageError, match="NumPy has no bfloat16"), as_arrays(torch.ones(2, dtype=torch.bfloat16)):
        pass
