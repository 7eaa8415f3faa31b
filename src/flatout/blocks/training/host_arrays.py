"""Tensors as NumPy arrays for as long as a loop over their elements takes.

An operator on a tensor of a few numbers costs some microseconds of dispatch, and on a GPU a launch; the same on an array a tenth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


@contextmanager
def as_arrays(*values: Any, into: Sequence[Tensor] = ()) -> Iterator[tuple[Any, ...]]:
    """The values, and behind them the tensors `into`, as NumPy arrays; what is no tensor as it is.

    Arrays of tensors on a CPU share their memory; those on a device are copied, and those of `into` copied back at the end of the
    `with`. Arithmetic with Python's numbers stays in an array's own dtype, as a tensor's does (NumPy 2, NEP 50): float32 is
    computed in float32, bit for bit as PyTorch does operator by operator. No gradients go through it.

    Raises:
        UsageError: Where a tensor requires gradients while they are recorded; a dtype that NumPy lacks (bfloat16); NumPy 1, which
            computes single float32 numbers in float64.

    >>> rewards, returns = torch.tensor([1.0, 0.0, 2.0]), torch.zeros(3)
    >>> with as_arrays(rewards, into=(returns,)) as (rewards_, returns_):
    ...     for t in reversed(range(3)):
    ...         returns_[t] = rewards_[t] + (0.5 * returns_[t + 1] if t < 2 else 0.0)
    >>> returns
    tensor([1.5000, 1.0000, 2.0000])
    """
    import numpy as np

    if int(np.__version__.partition(".")[0]) < 2:
        raise UsageError(f"NumPy {np.__version__} computes single float32 numbers in float64; as_arrays wants NumPy 2")
    arrays = [_array(tensor) for tensor in into]
    with np.errstate(all="ignore"):  # tensors divide by zero and overflow without a word
        yield (*(_array(value) if isinstance(value, Tensor) else value for value in values), *arrays)
    for tensor, array in zip(into, arrays, strict=True):
        if tensor.device.type != "cpu":
            tensor.detach().copy_(torch.from_numpy(array))


def _array(tensor: Tensor) -> NDArray[Any]:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UsageError("a tensor whose gradients are recorded cannot be an array: they would not go through it")
    try:
        array: NDArray[Any] = tensor.detach().cpu().numpy()
    except TypeError as e:
        raise UsageError(f"NumPy has no {str(tensor.dtype).removeprefix('torch.')}: {e}") from e
    return array
