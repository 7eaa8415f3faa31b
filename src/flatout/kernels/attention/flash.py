"""torch's FlashAttention-2 on tokens that lie behind one another, with documents and a window: no padding, no block lists."""

# T tokens of all samples, H heads, G key heads, D width

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class Spans(NamedTuple):
    """Document i is the tokens offsets[i] to offsets[i + 1] - 1; `offsets` int32 on the device, `longest` known to the host."""

    offsets: Tensor
    longest: int


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, spans: Spans, left: int | None, right: int | None, scale: float
) -> Tensor:
    """(T, H, D): each token on those of its document from `left` before to `right` after it, None for all on that side."""
    out: Tensor = _Flash.apply(q_THD, k_TGD, v_TGD, spans, left, right, scale)  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, left: int | None, right: int | None, scale: float
    ) -> Tensor:
        offsets, longest = spans
        ctx.is_causal = left is None and right == 0
        window = {} if ctx.is_causal else {"window_size_left": _bound(left), "window_size_right": _bound(right)}
        out, lse, rng, unused, _ = _forward(
            q, k, v, offsets, offsets, longest, longest, 0.0, ctx.is_causal, False, scale=scale, **window
        )
        ctx.save_for_backward(q, k, v, out, lse, rng, unused, offsets)
        ctx.longest, ctx.window, ctx.scale = longest, window, scale
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng, unused, offsets = ctx.saved_tensors
        grads = _backward(
            grad.contiguous(), q, k, v, out, lse, offsets, offsets, ctx.longest, ctx.longest, 0.0, ctx.is_causal, rng, unused,
            scale=ctx.scale, **ctx.window,
        )  # fmt: skip
        return (*grads, None, None, None, None)


def _bound(keys: int | None) -> int:
    return -1 if keys is None else keys
