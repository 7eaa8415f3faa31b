"""PyTorch's FlashAttention-2 on tokens that lie behind one another, with documents and a window: no padding, no block lists."""

# T tokens of all samples, H heads, G key heads, D width

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.blocks.kernels.attention.mask import Mask, sent
from flatout.blocks.kernels.attention.scores import Score
from flatout.blocks.kernels.attention.sdpa import half_refusal
from flatout.blocks.kernels.attention.structures import Band, Documents, band_of
from flatout.core.parts import kernel

_forward = torch.ops.aten._flash_attention_forward
_backward = torch.ops.aten._flash_attention_backward


class Spans(NamedTuple):
    """Document i is the tokens offsets[i] to offsets[i + 1] - 1; `offsets` int32 on the device, `longest` known to the host."""

    offsets: Tensor
    longest: int


class FlashOptions(NamedTuple):
    """Keys of the query's document from `left` before it to `right` after it, None for all on that side; scores' factor."""

    spans: Spans
    left: int | None
    right: int | None
    scale: float

    @property
    def is_causal(self) -> bool:
        """Whether a query sees every key up to its own place."""
        return self.left is None and self.right == 0

    @property
    def window(self) -> dict[str, int]:
        """The bounds as the kernel takes them: none where it is causal."""
        if self.is_causal:
            return {}
        left, right = (-1 if bound is None else bound for bound in (self.left, self.right))
        return {"window_size_left": left, "window_size_right": right}


def attend_by_flash(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *, spans: Spans, left: int | None, right: int | None, scale: float
) -> Tensor:
    """(T, H, D): each token on those of its document from `left` before to `right` after it, None for all on that side."""
    out: Tensor = _Flash.apply(q_THD, k_TGD, v_TGD, FlashOptions(spans, left, right, scale))  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: FlashOptions) -> Tensor:
        out, lse = flash_forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return (*flash_backward(grad, q, k, v, out, lse, ctx.options), None)


def flash_forward(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, options: FlashOptions) -> tuple[Tensor, Tensor]:
    """The result of `attend_by_flash`, and the logsumexp of each head's and token's scores, (H, T) float32."""
    (offsets, longest), is_causal = options.spans, options.is_causal
    sizes = (offsets, offsets, longest, longest)
    out, lse, *_ = _forward(q_THD, k_TGD, v_TGD, *sizes, 0.0, is_causal, False, scale=options.scale, **options.window)
    return out, lse


def flash_backward(
    grad_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    options: FlashOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    offsets, longest = options.spans
    # nothing is dropped, so that the state of random numbers is not read (as in torch.nn.attention.varlen)
    rng = torch.zeros(2, dtype=torch.uint64, device=q_THD.device)
    tensors = (grad_THD.contiguous(), q_THD, k_TGD, v_TGD, out_THD, lse_HT, offsets, offsets)
    state = (longest, longest, 0.0, options.is_causal, rng, q_THD.new_empty(0))
    grads: tuple[Tensor, Tensor, Tensor] = _backward(*tensors, *state, scale=options.scale, **options.window)
    return grads


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    band = band_of(mask)
    assert band is not None
    batch, _, length, _ = q.shape
    spans = spans_of(band, mask, batch, length, q.device)
    rows = [t.transpose(1, 2).reshape(batch * length, t.size(1), t.size(3)) for t in (q, k, v)]
    out = attend_by_flash(*rows, spans=spans, left=band.left, right=band.right, scale=scale)
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def spans_of(band: Band, mask: Mask, batch: int, length: int, device: torch.device) -> Spans:
    """The documents of all samples, kept with the mask that is this band; without documents a sample is one."""
    key = ("spans", batch, length, device)
    return (band.documents or mask).keep(key, lambda: _spans(band.documents, batch, length, device))


def _spans(documents: Documents | None, batch: int, length: int, device: torch.device) -> Spans:
    starts = torch.arange(batch) * length if documents is None else documents.starts(batch)
    offsets = torch.cat([starts, starts.new_full((1,), batch * length)])
    longest = int(offsets.diff().max())
    return Spans(sent(offsets.to(torch.int32), device), longest)


def refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    """Why the kernel cannot be taken; None if it can."""
    why = tensor_refusal(q, k, v, score=score)
    if why is not None:
        return why
    if band_of(mask) is None:
        return f"{mask!r} is more than a window within documents that lie behind one another"
    if q.size(2) != k.size(2):
        return f"there are {q.size(2)} queries and {k.size(2)} keys"
    return None


def tensor_refusal(q: Tensor, k: Tensor, v: Tensor, *, score: Score | None = None) -> str | None:
    """Why the kernel cannot take such tensors on their device, whatever the mask; None if it can."""
    why = half_refusal(q, k, v, score=score, widest=256)
    if why is None and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return why


KERNEL = kernel(
    __name__,
    "FlashAttention-2 on tokens that lie behind one another",
    _run,
    order=16,
    refusal=refusal,
    name="flash-varlen",
)
