"""Attention of packed rows, each on those of its own sample: FlashAttention on a GPU, sample by sample on a CPU.

The host reads nothing of a GPU, so that CUDA graphs can hold it.
"""

# N packed rows, H heads, G key heads, D width

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flatout.blocks.kernels.attention.flash_varlen import tensor_refusal
from flatout.blocks.kernels.attention.spans import SpanOptions, Spans
from flatout.blocks.kernels.attention.varlen import varlen_backward, varlen_forward
from flatout.blocks.kernels.opaque import composed, once, opaque

_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why packed rows of such queries, keys and values cannot be taken; None if they can. Their numbers are not read."""
    if q.device.type == "cpu":
        return None if q.size(-1) == v.size(-1) else f"widths of {q.size(-1)} and {v.size(-1)} differ"
    return tensor_refusal(q, k, v)


@composed(
    "attention_of_rows(Tensor q, Tensor k, Tensor v, Tensor index, Tensor offsets, SymInt longest, bool is_causal, float scale) "
    "-> Tensor"
)
def attention_of_rows(
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    index_N: Tensor,
    offsets: Tensor,
    longest: int,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """(N, H, D): sample i is the rows offsets[i] to offsets[i + 1] - 1, at most `longest`; zeros where the index is -1."""
    out: Tensor = _OfRows.apply(q_NHD, k_NGD, v_NGD, index_N, offsets, longest, is_causal, scale)  # type: ignore[no-untyped-call]
    return out


class _OfRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        index: Tensor,
        offsets: Tensor,
        longest: int,
        is_causal: bool,
        scale: float,
    ) -> Tensor:
        q, k, v = (t.contiguous() for t in (q, k, v))
        out, lse = _forward(q, k, v, offsets, longest, is_causal, scale)
        ctx.save_for_backward(q, k, v, index, offsets, out, lse)
        ctx.how = longest, is_causal, scale
        result: Tensor = out.masked_fill(_fills_up(index), 0)
        return result

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index, offsets, out, lse = ctx.saved_tensors
        grads = _backward(grad.contiguous(), q, k, v, offsets, out, lse, *ctx.how)
        # kernels leave what belongs to no sample as it was in memory
        return (*(t.masked_fill(_fills_up(index), 0) for t in grads), None, None, None, None, None)


def _fills_up(index_N: Tensor) -> Tensor:
    return (index_N < 0)[:, None, None]


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    return [torch.empty_like(q), q.new_empty((q.size(1), q.size(0)), dtype=_wide(q.dtype))]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@opaque(
    "attention_of_rows_forward(Tensor q, Tensor k, Tensor v, Tensor offsets, SymInt longest, bool is_causal, float scale) "
    "-> Tensor[]",
    _forward_shapes,
)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, longest: int, is_causal: bool, scale: float
) -> list[Tensor]:
    """The result and the logsumexp of each head's and row's scores, (H, N)."""
    if q.is_cuda:
        return list(varlen_forward(q, k, v, _options(offsets, longest, is_causal, scale)))
    out, lse_HN = torch.zeros_like(q), q.new_zeros((q.size(1), q.size(0)), dtype=_wide(q.dtype))
    for at in _samples(offsets):
        one, its_lse = _on_cpu(*_as_batch(q, k, v, at), 0.0, is_causal, scale=scale)
        out[at], lse_HN[:, at] = one[0].transpose(0, 1), its_lse.view(q.size(1), -1)
    return [out, lse_HN]


@opaque(
    "attention_of_rows_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor offsets, Tensor out, Tensor lse, "
    "SymInt longest, bool is_causal, float scale) -> Tensor[]",
    lambda grad, q, k, v, *others: [torch.empty_like(t) for t in (q, k, v)],
)
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    out: Tensor,
    lse: Tensor,
    longest: int,
    is_causal: bool,
    scale: float,
) -> list[Tensor]:
    if q.is_cuda:
        return list(varlen_backward(grad, q, k, v, out, lse, _options(offsets, longest, is_causal, scale)))
    grads, num = [torch.zeros_like(t) for t in (q, k, v)], k.size(1)
    for at in _samples(offsets):
        one, its_lse = (t[at].transpose(0, 1)[None] for t in (out, lse.t()[:, :, None]))
        arguments = (grad[at].transpose(0, 1)[None], *_as_batch(q, k, v, at), one, its_lse[..., 0])
        of_q, *of_keys = _backward_on_cpu(*arguments, 0.0, is_causal, scale=scale)
        grads[0][at] = of_q[0].transpose(0, 1)
        for whole, part in zip(grads[1:], of_keys, strict=True):
            whole[at] = part[0].unflatten(0, (num, -1)).sum(1).transpose(0, 1)
    return grads


def _options(offsets: Tensor, longest: int, is_causal: bool, scale: float) -> SpanOptions:
    return SpanOptions(Spans(offsets, longest), None, 0 if is_causal else None, scale)


def _samples(offsets: Tensor) -> list[slice]:
    """The rows of each sample that has any."""
    places = offsets.tolist()
    return [slice(start, end) for start, end in pairwise(places) if end > start]


def _as_batch(q: Tensor, k: Tensor, v: Tensor, at: slice) -> list[Tensor]:
    """A sample's queries, keys and values as a batch of one, (1, H, rows, D)."""
    each = q.size(1) // k.size(1)
    of_sample = (q[at], k[at].repeat_interleave(each, 1), v[at].repeat_interleave(each, 1))
    return [t.transpose(0, 1)[None] for t in of_sample]
