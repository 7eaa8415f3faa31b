"""PyTorch's FlashAttention-2 for every key and for causal masks, where cuDNN does not take the shapes."""

from __future__ import annotations

from functools import partial

from flatout.blocks.kernels.attention import sdpa
from flatout.core.parts import kernel

KERNEL = kernel(
    __name__,
    "FlashAttention-2",
    partial(sdpa.attend_by_sdpa, "flash"),
    order=20,
    refusal=partial(sdpa.refusal, "flash"),
    name="flash",
)
