"""Attention that is one fused kernel a direction in memory that grows with the length, or an error that says why not."""

# B batch, H heads, G key heads, Q queries, K keys, D width of queries and keys, E width of values

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.structures import Everything
from flatout.blocks.kernels.selection import KernelSelection, select_kernel
from flatout.core.errors import NotFused, UsageError

_REFERENCE: Final = "attention.reference"
_EVERYTHING: Final = Everything()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention softmax(score(q k^T scale) where mask) v, as (B, H, Q, E), of q (B, H, Q, D), k (B, G, K, D) and v (B, G, K, E).

    `mask` is made of `flatout.masks`, `score` of `flatout.scores`; `scale` is 1 / sqrt(D) if not given. With `enable_gqa` each of
    the G key heads serves H / G heads, else G is H. A query that sees no key gets 0. Memory is O(Q + K) and O(blocks seen);
    queries x keys numbers are never held. What a mask needs (block lists, pieces) is made at its first use and kept with it: use
    one mask for all layers. Under autocast its type is autocast's. The result is off float64's by no more than twice what plain
    attention in this dtype is.

    `attention_selection` says which kernel runs, and why, without running it. Raises NotFused where none can,
    UsageError for shapes that do not fit. The gradient cannot be differentiated again.
    """
    if torch.is_autocast_enabled(q.device.type):  # its type, as torch's attention has; what happens inside is not cast
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            return attention(q, k, v, mask=mask, score=score, scale=scale, enable_gqa=enable_gqa)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    selection = attention_selection(q, k, v, mask=mask, score=score, scale=scale, enable_gqa=enable_gqa)
    structure = _EVERYTHING if mask is None else mask
    out: Tensor = selection.kernel.run(q, k, v, mask=structure, score=score, scale=scale)
    return out


def attention_selection(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> KernelSelection:
    """The kernel that `attention` takes for these arguments, and why none before it: `print` it. Nothing is computed."""
    _check(q, k, v, mask, score, enable_gqa=enable_gqa)
    scale = q.size(-1) ** -0.5 if scale is None else scale
    structure = _EVERYTHING if mask is None else mask
    layout = tuple((t.shape, t.stride(), t.dtype, t.device) for t in (q, k, v))
    key = ("choice", layout, score.signature if score is not None else None)
    return structure.keep(key, lambda: _fused(q, k, v, structure, score, scale))


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Mask, score: Score | None, scale: float) -> KernelSelection:
    selection = select_kernel("attention", q, k, v, mask=mask, score=score, scale=scale)
    if selection.kernel.id == _REFERENCE:
        reasons = "; ".join(f"{id}: {why}" for id, why in selection.refusals)
        raise NotFused(
            f"no fused kernel takes {tuple(q.shape)} {q.dtype} on {q.device} with mask {mask!r} and score {score!r}. {reasons}"
        )
    return selection


def _check(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, score: Score | None, *, enable_gqa: bool) -> None:
    shapes = f"queries {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise UsageError(f"{shapes}: give (batch, heads, tokens, width)")
    if not (q.size(0) == k.size(0) == v.size(0) and k.shape[1:3] == v.shape[1:3] and q.size(3) == k.size(3)):
        raise UsageError(
            f"{shapes}: batches must agree, keys and values in heads and tokens, queries and keys in width"
        )
    if q.size(1) != k.size(1) and not (enable_gqa and k.size(1) and q.size(1) % k.size(1) == 0):
        raise UsageError(
            f"{shapes}: heads must agree; with enable_gqa=True those of queries may be a multiple of the keys'"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise UsageError(
            f"{q.dtype} on {q.device}, {k.dtype} on {k.device}, {v.dtype} on {v.device}: give one dtype and device"
        )
    for tensor in score.tensors if score is not None else ():
        if tensor.device != q.device:
            raise UsageError(
                f"a tensor of {score!r} is on {tensor.device}, and the queries are on {q.device}: send it there"
            )
    if mask is None:
        return
    mask.check(q.size(2), k.size(2))
    for what, wanted, there in (("samples", mask.batch, q.size(0)), ("heads", mask.heads, q.size(1))):
        if wanted not in (1, there):
            raise UsageError(f"the mask {mask!r} is of {wanted} {what}, and there are {there}")
