"""torch's binding of cuDNN's fused attention, for every key and for causal masks: the fastest there is on Hopper."""

from __future__ import annotations

from functools import partial

from flatout.kernels.attention import sdpa
from flatout.records.kernel import Kernel

KERNEL = Kernel(
    id="attention.cudnn",
    op="attention",
    title="cuDNN's fused attention",
    module=__name__,
    run=partial(sdpa.attend, "cudnn"),
    refusal=partial(sdpa.refusal, "cudnn"),
    order=10,
)
