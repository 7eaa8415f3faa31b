"""Documents behind one another, as kernels for sequences of varying length take them."""

# B batch, H heads, S tokens of a sample, D width; T tokens of all samples

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flatout.blocks.kernels.attention.mask import Mask, sent
from flatout.blocks.kernels.attention.structures import Band, Documents, band_of


class Spans(NamedTuple):
    """Document i is the tokens offsets[i] to offsets[i + 1] - 1; `offsets` int32 on the device, `longest` known to the host."""

    offsets: Tensor
    longest: int


class SpanOptions(NamedTuple):
    """Keys of the query's document from `left` before it to `right` after it, None for all on that side; scores' factor."""

    spans: Spans
    left: int | None
    right: int | None
    scale: float

    @property
    def is_causal(self) -> bool:
        """Whether a query sees every key up to its own place."""
        return self.left is None and self.right == 0


Forward = Callable[[Tensor, Tensor, Tensor, SpanOptions], tuple[Tensor, Tensor]]
"""What makes the result of queries, keys and values of tokens, and what its backward pass wants of the scores."""
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, SpanOptions], tuple[Tensor, Tensor, Tensor]]
"""What makes the gradients of the result's gradient, queries, keys, values, the result and what is wanted of the scores."""


class _OnSpans(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: SpanOptions, forward: Forward, backward: Backward
    ) -> Tensor:
        out, stats = forward(q, k, v, options)
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.options, ctx.of_gradient = options, backward
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, stats = ctx.saved_tensors
        return (*ctx.of_gradient(grad, q, k, v, out, stats, ctx.options), None, None, None)


def attend_on_tokens(
    q_THD: Tensor, k: Tensor, v: Tensor, options: SpanOptions, forward: Forward, backward: Backward
) -> Tensor:
    """(T, H, D): each token on those of its document that the options have it see, by that kernel."""
    out: Tensor = _OnSpans.apply(q_THD, k, v, options, forward, backward)  # type: ignore[no-untyped-call]
    return out


def attend_on_samples(
    q_BHSD: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, forward: Forward, backward: Backward
) -> Tensor:
    """(B, H, S, D): the same under a mask that is a band, on samples that are laid behind one another."""
    band = band_of(mask)
    assert band is not None
    batch, _, length, _ = q_BHSD.shape
    options = SpanOptions(spans_of(band, mask, batch, length, q_BHSD.device), band.left, band.right, scale)
    q, k, v = (t.transpose(1, 2).reshape(-1, t.size(1), t.size(3)) for t in (q_BHSD, k, v))
    out = attend_on_tokens(q, k, v, options, forward, backward)
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
