"""One Triton kernel each way, over heads wherever they lie: a part of a packed projection needs no copy.

B batch, T tokens, N heads, H head dim, R pairs of a head, L positions that the tables have
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.forced import no_triton
from flatout.kernels.opaque import opaque
from flatout.kernels.rotary.turning import TURN_ARGUMENTS, shapes, turned
from flatout.records.kernel import Kernel

_SOURCE: Final = "flatout.kernels.rotary.on_device.turn"
_BLOCK: Final = 2048
"""Pairs of a program: 16 a thread with 4 warps."""


@opaque("rotary_triton" + TURN_ARGUMENTS, shapes)
def _turn(
    x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None, layout: str, is_back: bool
) -> Tensor:
    x = _with_rows(x_BTNH)
    cos, sin = _with_rows(cos_LR), _with_rows(sin_LR)
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    batch, num_tokens, num_heads, head_dim = x.shape
    if x.numel() == 0:
        return made
    at = positions.expand(batch, num_tokens) if positions is not None else None
    block_r = 1 << (head_dim // 2 - 1).bit_length()
    block_n = min(1 << (num_heads - 1).bit_length(), max(1, _BLOCK // block_r))
    source: Any = import_module(_SOURCE)
    source.turn[(batch * num_tokens, math.ceil(num_heads / block_n))](
        x,
        cos,
        sin,
        at if at is not None else x,
        made,
        *x.stride()[:3],
        cos.stride(0),
        sin.stride(0),
        *(at.stride() if at is not None else (0, 0)),
        num_tokens,
        num_heads,
        head_dim // 2,
        len(cos),
        HAS_POSITIONS=at is not None,
        IS_HALF=layout == "half",
        IS_BACK=is_back,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=max(1, min(4, block_n * block_r // 512)),
    )
    return made


def _with_rows(t: Tensor) -> Tensor:
    """Heads may lie at any distance; their numbers must be neighbours."""
    return t if t.stride(-1) == 1 else t.contiguous()


def refusal(
    x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None = None, *, layout: str = "half"
) -> str | None:
    """GPUs, and at most 32 bits a number."""
    return no_triton(x_BTNH, cos_LR, sin_LR, positions)


KERNEL = Kernel(
    id="rotary.triton",
    op="rotary",
    title="One Triton kernel each way",
    module=__name__,
    run=partial(turned, _turn),
    refusal=refusal,
    order=100,
)
