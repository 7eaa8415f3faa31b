"""Attention of some queries on some keys in plain products, with any function of the scores; the tile alone is in memory."""

# B batch, H heads, q queries, k keys, D width of queries and keys, E width of values

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.kernels.attention.scores import Score


class Scoring(NamedTuple):
    """How the pairs of a tile are scored: numbers of samples, heads, queries and keys, and which pairs are seen, None for all."""

    score: Score | None
    samples: Tensor
    heads: Tensor
    queries: Tensor
    keys: Tensor
    seen: Tensor | None
    scale: float

    def apply(self, raw_BHqk: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """The score's function of raw scores."""
        assert self.score is not None
        places = (self.samples[:, None, None, None], self.heads[:, None, None], self.queries[:, None], self.keys)
        return self.score.function(raw_BHqk, *places, *tensors)

    def scored(self, raw_BHqk: Tensor) -> Tensor:
        """Scores before the softmax, -inf where a pair is not seen."""
        scores = raw_BHqk if self.score is None else self.apply(raw_BHqk, self.score.tensors)
        return scores if self.seen is None else scores.masked_fill(~self.seen, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """(B, H, q, E) and the log-sum-exp (B, H, q); 0 and -inf for a query that sees no key. In float32, or float64."""
    q, k, v = (_wide(t) for t in (q, k, v))
    scores = scoring.scored(q @ k.transpose(-1, -2) * scoring.scale)
    lse = scores.logsumexp(dim=-1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    return (scores - shift.unsqueeze(-1)).exp() @ v, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    grad: Tensor,
    scoring: Scoring,
    more: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v by this tile, where `out` and `lse` are of all keys; of the score's tensors, added to `more`.

    With p the weights and dp the gradient of each, the score's is p (dp - sum(out * grad)) (Dao et al., 2022, appendix B).
    """
    q, k, v, out, grad = (_wide(t) for t in (q, k, v, out, grad))
    raw = q @ k.transpose(-1, -2) * scoring.scale
    with torch.enable_grad():
        raw.requires_grad_()
        scores = scoring.scored(raw)
    weights = (scores.detach() - lse.unsqueeze(-1)).exp()
    of_weights = grad @ v.transpose(-1, -2) - (out * grad).sum(-1, keepdim=True)
    of_scores = weights * of_weights
    wanted = [t for t in (scoring.score.tensors if scoring.score is not None else ()) if t.requires_grad]
    of_raw, *of_tensors = torch.autograd.grad(scores, [raw, *wanted], of_scores, allow_unused=True)
    for total, part in zip((m for m in more if m is not None), of_tensors, strict=True):
        if part is not None:
            total.add_(part)
    of_raw = torch.zeros_like(raw) if of_raw is None else of_raw * scoring.scale
    return of_raw @ k, of_raw.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
