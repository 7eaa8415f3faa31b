"""PyTorch's FlashAttention-2 on tokens that lie behind one another, with documents and a window: no padding, no block lists."""

# T tokens of all samples, H heads, G key heads, D width

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.sdpa import half_refusal
from flatout.blocks.kernels.attention.structures import Band, band_of
from flatout.core.parts import kernel

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class Spans(NamedTuple):
    """Document i is the tokens offsets[i] to offsets[i + 1] - 1; `offsets` int32 on the device, `longest` known to the host."""

    offsets: Tensor
    longest: int


def attend_by_flash(
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
        bounds = {"window_size_left": -1 if left is None else left, "window_size_right": -1 if right is None else right}
        window = {} if ctx.is_causal else bounds
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


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    band = band_of(mask)
    assert band is not None
    batch, _, length, _ = q.shape
    key = ("spans", batch, length, q.device)
    spans = (band.documents or mask).keep(key, lambda: _spans(band, batch, length, q.device))
    rows = [t.transpose(1, 2).reshape(batch * length, t.size(1), t.size(3)) for t in (q, k, v)]
    out = attend_by_flash(*rows, spans=spans, left=band.left, right=band.right, scale=scale)
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def _spans(band: Band, batch: int, length: int, device: torch.device) -> Spans:
    """Of the documents of all samples; without documents a sample is one."""
    offsets = torch.tensor([0, length]) if band.documents is None else band.documents.offsets
    assert offsets is not None
    longest = int(offsets.diff().max())
    starts = torch.arange(batch)[:, None] * length + offsets[:-1]
    every = torch.cat([starts.reshape(-1), torch.tensor([batch * length])]).to(torch.int32)
    return Spans(every.pin_memory().to(device, non_blocking=True), longest)


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    why = half_refusal(q, k, v, score=score, widest=256)
    if why is not None:
        return why
    band = band_of(mask)
    if band is None:
        return f"{mask!r} is more than a window within documents that lie behind one another"
    if q.size(2) != k.size(2):
        return f"there are {q.size(2)} queries and {k.size(2)} keys"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return None


KERNEL = kernel(
    __name__,
    "FlashAttention-2 on tokens that lie behind one another",
    _run,
    order=16,
    refusal=_refusal,
    name="flash-varlen",
)
