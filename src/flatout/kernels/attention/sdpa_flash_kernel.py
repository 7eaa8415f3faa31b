"""torch's FlashAttention-2 for every key and for causal masks, where cuDNN does not take the shapes."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatout.kernels.attention.band import band_of
from flatout.kernels.attention.mask import Mask
from flatout.kernels.attention.scores import Score
from flatout.kernels.attention.sdpa import refusal_of
from flatout.records.kernel import Kernel


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    band = band_of(mask)
    assert band is not None
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=band.is_causal, scale=scale, enable_gqa=q.size(1) != k.size(1)
        )


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    return refusal_of("flash", q, k, v, mask=mask, score=score)


KERNEL = Kernel(
    id="attention.flash",
    op="attention",
    title="FlashAttention-2",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=20,
)
