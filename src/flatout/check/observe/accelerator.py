"""Whether a process, and a loop in it, computes on a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def uses_cuda() -> bool:
    """Whether this process has begun to use a CUDA device."""
    return torch.cuda.is_available() and torch.cuda.is_initialized()


def is_on_accelerator(tensors: Iterable[Tensor]) -> bool:
    """Whether a loop that works with these tensors computes on a CUDA device: one of them lies there.

    Where there are none to ask, whether this process uses a device at all.
    """
    if not uses_cuda():
        return False
    on_cuda = {t.is_cuda for t in tensors}
    return not on_cuda or True in on_cuda
