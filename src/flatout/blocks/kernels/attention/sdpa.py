"""PyTorch's fused attention on a GPU, for every key and for causal masks: how it is called, and what it cannot take, in words.

FlashAttention-2 is the kernel of this module: it runs where cuDNN's, in a module of its own, does not take the shapes.
"""

from __future__ import annotations

from functools import partial
from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.structures import band_of
from flatout.core.parts import kernel

Backend = Literal["cudnn", "flash"]
_BACKENDS: Final = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_HALF: Final = (torch.bfloat16, torch.float16)


def half_refusal(q: Tensor, k: Tensor, v: Tensor, *, score: Score | None, widest: int) -> str | None:
    """What rules out a kernel on matrix units of half precision, whatever the mask."""
    if q.device.type != "cuda":
        return f"the tensors are on {q.device.type}"
    if q.dtype not in _HALF:
        return f"{q.dtype} is neither bfloat16 nor float16"
    if score is not None:
        return f"it has no place for {score!r}"
    if q.size(3) != v.size(3) or q.size(3) % 8 or q.size(3) > widest:
        return f"widths of {q.size(3)} and {v.size(3)} are not one multiple of 8 up to {widest}"
    if any(t.stride(-1) != 1 for t in (q, k, v)):
        return "the width is not the innermost dimension in memory"
    return None


def attend_by_sdpa(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float
) -> Tensor:
    """(B, H, Q, D) by that kernel and no other; `refusal` comes first."""
    band = band_of(mask)
    assert band is not None and score is None
    with sdpa_kernel(_BACKENDS[backend]):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=band.is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )


def refusal(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float
) -> str | None:
    """Why torch's binding of the kernel cannot be taken; None if it can."""
    why = half_refusal(q, k, v, score=score, widest=256)
    if why is not None:
        return why
    band = band_of(mask)
    if band is None or band.documents is not None or not (band.is_open or band.is_causal):
        return f"torch binds it for causal masks and for none, and the mask is {mask!r}"
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, band.is_causal, q.size(1) != k.size(1))
    can = {"cudnn": torch.backends.cuda.can_use_cudnn_attention, "flash": torch.backends.cuda.can_use_flash_attention}
    return None if can[backend](params, debug=False) else f"torch says that {backend} does not take these shapes here"


KERNEL = kernel(
    __name__,
    "FlashAttention-2",
    partial(attend_by_sdpa, "flash"),
    order=20,
    refusal=partial(refusal, "flash"),
    name="flash",
)
