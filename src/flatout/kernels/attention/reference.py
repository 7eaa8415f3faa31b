"""The specification: scores of all pairs, their function, the mask, softmax, weighted values.

It holds queries x keys numbers, and is what the others are compared with; `flatout.attention` never takes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.attention.mask import Mask
from flatout.kernels.attention.scores import Score
from flatout.records.kernel import Kernel


def attention(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    """(B, H, Q, E) of q (B, H, Q, D), k (B, G, K, D) and v (B, G, K, E), where each of G key heads serves H / G heads.

    A query that sees no key gets 0.
    """
    k, v = (t.repeat_interleave(q.size(1) // t.size(1), dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if score is not None:
        index = [torch.arange(n, device=q.device) for n in (*q.shape[:3], k.size(2))]
        places = [i.view([-1 if d == at else 1 for d in range(4)]) for at, i in enumerate(index)]
        scores = score.mod()(scores, places[0], places[1], places[2], places[3])
    mask.check(q.size(2), k.size(2))
    seen = mask.dense(q.size(2), k.size(2), q.device)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).where(seen.any(-1, keepdim=True), 0.0)
    return weights @ v


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    return None


KERNEL = Kernel(
    id="attention.reference",
    op="attention",
    title="scores of all pairs in memory",
    module=__name__,
    run=attention,
    refusal=_refusal,
    order=1000,
)
