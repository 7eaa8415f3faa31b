"""One Triton kernel forward and one backward, the sum before the norm included."""

from __future__ import annotations

from functools import partial

from flatout.blocks.kernels.norm.triton_norms import normed
from flatout.blocks.kernels.selection import no_triton
from flatout.core.parts import kernel

KERNEL = kernel(
    __name__, "One Triton kernel forward, one backward", partial(normed, is_centred=True), order=100, refusal=no_triton
)
