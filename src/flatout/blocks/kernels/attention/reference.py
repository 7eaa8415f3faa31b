"""The specification: scores of all pairs, their function, the mask, softmax, weighted values.

It holds queries x keys numbers, and is what the others are compared with; `flatout.attention` never takes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.mask import Mask, every_index
from flatout.blocks.kernels.attention.scores import Score
from flatout.core.parts import kernel


def reference_attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    """(B, H, Q, E) of q (B, H, Q, D), k (B, G, K, D) and v (B, G, K, E), where each of G key heads serves H / G heads.

    A query that sees no key gets 0.
    """
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if score is not None:
        scores = score.mod()(scores, *every_index(*q.shape[:3], k.size(2), device=q.device))
    mask.check(q.size(2), k.size(2))
    visible = mask.dense(q.size(2), k.size(2), q.device)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).where(visible.any(-1, keepdim=True), 0.0)
    return weights @ v


KERNEL = kernel(__name__, "scores of all pairs in memory", reference_attention, order=1000)
