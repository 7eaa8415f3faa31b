"""torch's FlashAttention-2 for every key and for causal masks, where cuDNN does not take the shapes."""

from __future__ import annotations

from functools import partial

from flatout.kernels.attention import sdpa
from flatout.records.kernel import Kernel

KERNEL = Kernel(
    id="attention.flash",
    op="attention",
    title="FlashAttention-2",
    module=__name__,
    run=partial(sdpa.attend, "flash"),
    refusal=partial(sdpa.refusal, "flash"),
    order=20,
)
