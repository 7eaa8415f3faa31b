"""One Triton kernel forward and one backward, over heads wherever they lie: a part of a packed projection needs no copy.

B batch, T tokens, N heads, H head dim, R pairs of a head, L positions that the tables have
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import opaque, with_dense_rows
from flatout.blocks.kernels.rotary.reference import ROTATION_ARGUMENTS, rotate_with_gradient, rotation_shapes
from flatout.blocks.kernels.selection import no_triton
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.rotary.on_device.rotation"
_BLOCK: Final = 2048
"""Pairs of a program: 16 a thread with 4 warps."""


@opaque("rotary_triton" + ROTATION_ARGUMENTS, rotation_shapes)
def _rotate(
    x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None, layout: str, is_back: bool
) -> Tensor:
    x = with_dense_rows(x_BTNH)
    cos, sin = with_dense_rows(cos_LR), with_dense_rows(sin_LR)
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, num_tokens, num_heads, head_dim = x.shape
    if x.numel() == 0:
        return result
    at = positions.expand(batch, num_tokens) if positions is not None else None
    block_r = 1 << (head_dim // 2 - 1).bit_length()
    block_n = min(1 << (num_heads - 1).bit_length(), max(1, _BLOCK // block_r))
    strides = (*x.stride()[:3], cos.stride(0), sin.stride(0), *(at.stride() if at is not None else (0, 0)))
    sizes = (num_tokens, num_heads, head_dim // 2, len(cos))
    source: Any = import_module(_SOURCE)
    source.rotate[(batch * num_tokens, math.ceil(num_heads / block_n))](
        *(x, cos, sin, at if at is not None else x, result),
        *strides,
        *sizes,
        HAS_POSITIONS=at is not None,
        IS_HALF=layout == "half",
        IS_BACK=is_back,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=max(1, min(4, block_n * block_r // 512)),
    )
    return result


KERNEL = kernel(
    __name__,
    "One Triton kernel forward, one backward",
    partial(rotate_with_gradient, _rotate),
    order=100,
    refusal=no_triton,
)
