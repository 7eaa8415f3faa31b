"""PyTorch's binding of cuDNN's fused attention, for every key and for causal masks: the fastest there is on Hopper."""

from __future__ import annotations

from functools import partial

from flatout.blocks.kernels.attention import sdpa
from flatout.core.parts import kernel

KERNEL = kernel(
    __name__,
    "cuDNN's fused attention",
    partial(sdpa.attend_by_sdpa, "cudnn"),
    order=10,
    refusal=partial(sdpa.refusal, "cudnn"),
    name="cudnn",
)
