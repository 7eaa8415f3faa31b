"""Attention on a CPU, piece by piece, forward and backward: torch's own kernels on the keys that queries see, joined by their
log-sum-exp (Dao et al., FlashAttention, 2022), and plain products of a tile where scores are a function of the pair.
"""

# B batch, H heads, G key heads, Q queries, K keys, D width of queries and keys, E width of values; q, k: those of a part

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.pieces import MaskPart, MaskPiece, Pieces, pieces_of
from flatout.blocks.kernels.attention.scores import Score
from flatout.core.parts import kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for group, piece in _each(pieces, q, k):
            rows = (*group.of_queries, slice(piece.begin, piece.end))
            tiles = [_tile(k, v, group, piece, part, score, scale) for part in piece.parts]
            parts = [_forward_of(q[rows], tile) for tile in tiles]
            out[rows], lse[rows] = parts[0] if len(parts) == 1 else _joined(parts, out.dtype)
        ctx.pieces, ctx.score, ctx.scale = pieces, score, scale
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        total = torch.promote_types(q.dtype, torch.float32)
        sums = [torch.zeros(t.shape, dtype=total) for t in (q, k, v)]
        score, more = _to_be_derived(ctx.score, tensors, ctx.needs_input_grad[6:], total)
        lse = lse.masked_fill(lse == -torch.inf, 0.0)  # of rows that see nothing: exp(-inf - 0) is 0
        for group, piece in _each(ctx.pieces, q, k):
            rows = (*group.of_queries, slice(piece.begin, piece.end))
            own = _Rows(q[rows], out[rows], lse[rows], grad[rows])
            for part in piece.parts:
                of_q, *of_keys = _backward_of(own, _tile(k, v, group, piece, part, score, ctx.scale), more)
                sums[0][rows] += of_q
                for whole, of_part in zip(sums[1:], of_keys, strict=True):
                    _spread(whole, of_part, group, part)
        of_scores = [None if m is None else m.to(t.dtype) for m, t in zip(more, tensors, strict=True)]
        return (*(s.to(t.dtype) for s, t in zip(sums, (q, k, v), strict=True)), None, None, None, *of_scores)


class _Rows(NamedTuple):
    """What the backward pass needs of the queries of a piece."""

    q: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor


def _each(pieces: Pieces, q: Tensor, k: Tensor) -> Iterator[tuple[_Group, MaskPiece]]:
    per_key = q.size(1) // k.size(1)
    for sample, head, some in pieces:
        samples = slice(None) if sample is None else slice(sample, sample + 1)
        heads = slice(None) if head is None else slice(head, head + 1)
        key_heads = slice(None) if head is None else slice(head // per_key, head // per_key + 1)
        numbers = torch.arange(q.size(0))[samples], torch.arange(q.size(1))[heads]
        group = _Group((samples, heads), (samples, key_heads), *numbers)
        for piece in some:
            yield group, piece


def _keys(x_BGKD: Tensor, group: _Group, part: MaskPart) -> Tensor:
    """(B, H, k, D): the part's keys for each head of the group."""
    x = x_BGKD[group.of_keys]
    runs = [x[:, :, lo:hi] for lo, hi in part.runs]
    x = runs[0] if len(runs) == 1 else torch.cat(runs, dim=2)
    return x.repeat_interleave(group.heads.numel() // x.size(1), dim=1) if x.size(1) < group.heads.numel() else x


def _spread(sum_BGKD: Tensor, of_part_BHkD: Tensor, group: _Group, part: MaskPart) -> None:
    """Add what `_keys` took."""
    there = sum_BGKD[group.of_keys]
    is_shared = of_part_BHkD.size(1) > there.size(1)
    of_part = of_part_BHkD.unflatten(1, (there.size(1), -1)).sum(2) if is_shared else of_part_BHkD
    at = 0
    for lo, hi in part.runs:
        there[:, :, lo:hi] += of_part[:, :, at : at + hi - lo]
        at += hi - lo


class _Tile(NamedTuple):
    """The keys and values of a part, and how its pairs are scored: numbers of samples, heads, queries and keys, and which pairs
    are seen, None for all, or up to the diagonal."""

    k: Tensor
    v: Tensor
    score: Score | None
    samples: Tensor
    heads: Tensor
    queries: Tensor
    keys: Tensor
    visible: Tensor | None
    is_causal: bool
    scale: float

    def apply(self, raw_BHqk: Tensor) -> Tensor:
        """The score's function of raw scores."""
        assert self.score is not None
        places = (self.samples[:, None, None, None], self.heads[:, None, None], self.queries[:, None], self.keys)
        return self.score.function(raw_BHqk, *places, *self.score.tensors)

    def scored(self, raw_BHqk: Tensor) -> Tensor:
        """Scores before the softmax, -inf where a pair is not seen."""
        scores = raw_BHqk if self.score is None else self.apply(raw_BHqk)
        return scores if self.visible is None else scores.masked_fill(~self.visible, -torch.inf)

    def is_plain(self, q: Tensor) -> bool:
        """Whether torch's kernel does it: scores as they are, or with a number added that is exact enough in the dtype of q."""
        is_added = self.score is None or (
            self.score.is_additive
            and q.dtype in (torch.float32, torch.float64)
            and not any(t.requires_grad for t in self.score.tensors)
        )
        return is_added and q.size(3) == self.v.size(3)

    def added(self, q: Tensor) -> Tensor | None:
        """What torch's kernel adds to scores: the score's bias, and -inf where a pair is not seen."""
        if self.score is not None:
            bias = self.apply(torch.zeros(1, 1, 1, 1, dtype=q.dtype)).to(q.dtype)
            bias = bias.expand(-1, -1, self.queries.numel(), self.keys.numel())
        elif self.visible is not None:
            bias = torch.zeros(self.visible.shape, dtype=q.dtype)
        else:
            return None
        return bias if self.visible is None else bias.masked_fill(~self.visible, -torch.inf)


def _tile(
    k: Tensor, v: Tensor, group: _Group, piece: MaskPiece, part: MaskPart, score: Score | None, scale: float
) -> _Tile:
    keys = torch.cat([torch.arange(lo, hi) for lo, hi in part.runs])
    numbers = (group.samples, group.heads, torch.arange(piece.begin, piece.end), keys)
    here = (_keys(k, group, part), _keys(v, group, part))
    return _Tile(*here, score, *numbers, part.visible, part.is_causal, scale)


def _forward_of(q: Tensor, tile: _Tile) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the tile alone; 0 and -inf where it holds nothing for a row."""
    if tile.is_plain(q):
        out, lse = _forward(q, tile.k, tile.v, 0.0, tile.is_causal, attn_mask=tile.added(q), scale=tile.scale)
        if tile.visible is not None:
            lse = lse.masked_fill(~tile.visible.any(dim=1), -torch.inf)  # the kernel says 0 where a row sees nothing
        return out, lse
    q, k, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (q, tile.k, tile.v))
    scores = tile.scored(q @ k.transpose(-1, -2) * tile.scale)
    lse = scores.logsumexp(dim=-1)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    return (scores - shift.unsqueeze(-1)).exp() @ v, lse


def _backward_of(own: _Rows, tile: _Tile, more: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's share of the gradients of queries, keys and values; that of the score's tensors is added to `more`.

    With p the weights and dp the gradient of each, the score's is p (dp - sum(out * grad)) (Dao et al., 2022, appendix B).
    """
    if tile.is_plain(own.q):
        grads: tuple[Tensor, Tensor, Tensor] = _backward(
            own.grad, own.q, tile.k, tile.v, own.out, own.lse, 0.0, tile.is_causal,
            attn_mask=tile.added(own.q), scale=tile.scale,
        )  # fmt: skip
        return grads
    tensors = (own.q, tile.k, tile.v, own.out, own.grad)
    q, k, v, out, grad = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)
    raw = q @ k.transpose(-1, -2) * tile.scale
    with torch.enable_grad():
        raw.requires_grad_()
        scores = tile.scored(raw)
    weights = (scores.detach() - own.lse.unsqueeze(-1)).exp()
    of_weights = grad @ v.transpose(-1, -2) - (out * grad).sum(-1, keepdim=True)
    of_scores = weights * of_weights
    wanted = [t for t in (tile.score.tensors if tile.score is not None else ()) if t.requires_grad]
    of_raw, *of_tensors = torch.autograd.grad(scores, [raw, *wanted], of_scores, allow_unused=True)
    for total, part in zip((m for m in more if m is not None), of_tensors, strict=True):
        if part is not None:
            total.add_(part)
    of_raw = torch.zeros_like(raw) if of_raw is None else of_raw * tile.scale
    return of_raw @ k, of_raw.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad


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


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    key = ("pieces", q.size(2), k.size(2), score is None and q.size(3) == v.size(3))
    pieces = mask.keep(key, lambda: pieces_of(mask, q.size(2), k.size(2), is_tiled=not key[3]))
    tensors = score.tensors if score is not None else ()
    out: Tensor = _Attention.apply(q, k, v, pieces, score, scale, *tensors)  # type: ignore[no-untyped-call]
    return out


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    if q.device.type != "cpu":
        return f"the tensors are on {q.device.type}"
    if q.dtype not in _DTYPES:
        return f"{q.dtype} is none of {', '.join(map(str, _DTYPES))}"
    return None


KERNEL = kernel(
    __name__,
    "torch's CPU kernel on the blocks that are seen, joined by log-sum-exp",
    _run,
    order=10,
    refusal=_refusal,
    name="pieces",
)
