"""Attention on a CPU, piece by piece, forward and backward: torch's own kernels on the keys that queries see, joined by their
log-sum-exp (Dao et al., FlashAttention, 2022), and plain products where scores are a function of the pair.
"""

# B batch, H heads, G key heads, Q queries, K keys, D width of queries and keys, E width of values; q, k: those of a part

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.kernels.attention import tile
from flatout.kernels.attention.pieces import Part, Piece, Pieces
from flatout.kernels.attention.scores import Score
from flatout.kernels.attention.tile import Scoring

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend(
    q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, *, pieces: Pieces, score: Score | None, scale: float
) -> Tensor:
    """(B, H, Q, E). Rows that see no key are 0, and get no gradient. The gradient cannot be differentiated again."""
    tensors = score.tensors if score is not None else ()
    out: Tensor = _Attention.apply(q_BHQD, k_BGKD, v_BGKE, pieces, score, scale, *tensors)  # type: ignore[no-untyped-call]
    return out


class _Group(NamedTuple):
    """Samples and heads that see the same keys: where they lie in queries and in keys, and their numbers."""

    of_queries: tuple[slice, slice]
    of_keys: tuple[slice, slice]
    samples: Tensor
    heads: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, pieces: Pieces, score: Score | None, scale: float, *tensors: Tensor
    ) -> Tensor:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = torch.full(q.shape[:3], -torch.inf, dtype=_total(q.dtype))
        for group, piece in _each(pieces, q, k):
            rows = (*group.of_queries, slice(piece.begin, piece.end))
            parts = [_part_forward(q[rows], k, v, group, piece, part, score, scale) for part in piece.parts]
            out[rows], lse[rows] = parts[0] if len(parts) == 1 else _joined(parts, out.dtype)
        ctx.pieces, ctx.score, ctx.scale = pieces, score, scale
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        total = _total(q.dtype)
        sums = _Sums(*(torch.zeros(t.shape, dtype=total) for t in (q, k, v)))
        score, more = _to_be_derived(ctx.score, tensors, ctx.needs_input_grad[6:], total)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of rows that see nothing: exp(-inf - 0) is 0
        for group, piece in _each(ctx.pieces, q, k):
            rows = (*group.of_queries, slice(piece.begin, piece.end))
            own = _Rows(q[rows], out[rows], lse[rows], grad[rows])
            for part in piece.parts:
                of_q, of_k, of_v = _part_backward(own, k, v, group, piece, part, score, ctx.scale, more)
                sums.q[rows] += of_q
                _spread(sums.k, of_k, group, part)
                _spread(sums.v, of_v, group, part)
        of_scores = [None if m is None else m.to(t.dtype) for m, t in zip(more, tensors, strict=True)]
        return (*(s.to(t.dtype) for s, t in zip(sums, (q, k, v), strict=True)), None, None, None, *of_scores)


class _Sums(NamedTuple):
    """Of gradients, in float32 or float64."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Rows(NamedTuple):
    """What the backward pass needs of the queries of a piece."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor


def _total(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _each(pieces: Pieces, q: Tensor, k: Tensor) -> Iterator[tuple[_Group, Piece]]:
    per_key = q.size(1) // k.size(1)
    for sample, head, some in pieces.groups:
        samples = slice(None) if sample is None else slice(sample, sample + 1)
        heads = slice(None) if head is None else slice(head, head + 1)
        key_heads = slice(None) if head is None else slice(head // per_key, head // per_key + 1)
        numbers = torch.arange(q.size(0))[samples], torch.arange(q.size(1))[heads]
        group = _Group((samples, heads), (samples, key_heads), *numbers)
        for piece in some:
            yield group, piece


def _keys(x_BGKD: Tensor, group: _Group, part: Part) -> Tensor:
    """(B, H, k, D): the part's keys for each head of the group."""
    x = x_BGKD[group.of_keys]
    x = (
        x[:, :, slice(*part.runs[0])]
        if len(part.runs) == 1
        else torch.cat([x[:, :, lo:hi] for lo, hi in part.runs], dim=2)
    )
    return x.repeat_interleave(group.heads.numel() // x.size(1), dim=1) if x.size(1) < group.heads.numel() else x


def _spread(sum_BGKD: Tensor, of_part_BHkD: Tensor, group: _Group, part: Part) -> None:
    """Add what `_keys` took."""
    there = sum_BGKD[group.of_keys]
    of_part = (
        of_part_BHkD.unflatten(1, (there.size(1), -1)).sum(2) if of_part_BHkD.size(1) > there.size(1) else of_part_BHkD
    )
    at = 0
    for lo, hi in part.runs:
        there[:, :, lo:hi] += of_part[:, :, at : at + hi - lo]
        at += hi - lo


def _part_forward(
    q: Tensor, k: Tensor, v: Tensor, group: _Group, piece: Piece, part: Part, score: Score | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the part alone; 0 and -inf where it holds nothing for a row."""
    k, v = _keys(k, group, part), _keys(v, group, part)
    scoring = _scoring(score, group, piece, part, scale)
    if not _is_plain(score, q, v):
        return tile.forward(q, k, v, scoring)
    out, lse = _forward(q, k, v, 0.0, part.is_causal, attn_mask=_added(q, scoring), scale=scale)
    if part.seen is not None:
        lse = lse.masked_fill(~part.seen.any(dim=1), -torch.inf)  # the kernel says 0 where a row sees nothing
    return out, lse


def _part_backward(
    own: _Rows,
    k: Tensor,
    v: Tensor,
    group: _Group,
    piece: Piece,
    part: Part,
    score: Score | None,
    scale: float,
    more: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """The part's share of the gradients of queries, keys and values; that of the score's tensors is added to `more`."""
    k, v = _keys(k, group, part), _keys(v, group, part)
    scoring = _scoring(score, group, piece, part, scale)
    if not _is_plain(score, own.q, v):
        return tile.backward(own.q, k, v, own.out, own.lse, own.grad, scoring, more)
    added = _added(own.q, scoring)
    grads: tuple[Tensor, Tensor, Tensor] = _backward(
        own.grad, own.q, k, v, own.out, own.lse, 0.0, part.is_causal, attn_mask=added, scale=scale
    )
    return grads


def _is_plain(score: Score | None, q: Tensor, v: Tensor) -> bool:
    """Whether torch's kernel does it: scores as they are, or with a number added that is exact enough in the queries' dtype."""
    is_added = score is None or (
        score.is_additive
        and q.dtype in (torch.float32, torch.float64)
        and not any(t.requires_grad for t in score.tensors)
    )
    return is_added and q.size(3) == v.size(3)


def _scoring(score: Score | None, group: _Group, piece: Piece, part: Part, scale: float) -> Scoring:
    keys = torch.cat([torch.arange(lo, hi) for lo, hi in part.runs])
    return Scoring(score, group.samples, group.heads, torch.arange(piece.begin, piece.end), keys, part.seen, scale)


def _added(q: Tensor, scoring: Scoring) -> Tensor | None:
    """What torch's kernel adds to scores: the score's bias, and -inf where a pair is not seen."""
    seen = scoring.seen
    if scoring.score is None:
        return None if seen is None else torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(~seen, -torch.inf)
    bias = scoring.apply(torch.zeros(1, 1, 1, 1, dtype=q.dtype), scoring.score.tensors).to(q.dtype)
    bias = bias.expand(-1, -1, scoring.queries.numel(), scoring.keys.numel())
    return bias if seen is None else bias.masked_fill(~seen, -torch.inf)


def _to_be_derived(
    score: Score | None, tensors: Sequence[Tensor], needs: Sequence[bool], total: torch.dtype
) -> tuple[Score | None, list[Tensor | None]]:
    """The score on tensors of its own, and a sum for the gradient of each that needs one."""
    if score is None:
        return None, []
    own = tuple(t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True))
    return score._replace(tensors=own), [torch.zeros(t.shape, dtype=total) if t.requires_grad else None for t in own]


def _joined(parts: Sequence[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One output and log-sum-exp out of several over disjoint keys."""
    lse = torch.stack([part[1] for part in parts]).logsumexp(dim=0)
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    out = sum(out * (part - base).exp().unsqueeze(-1) for out, part in parts)
    assert isinstance(out, Tensor)
    return out.to(dtype), lse
