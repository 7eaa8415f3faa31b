"""Attention under a mask that is written out pair by pair, which torch.compile takes whole: the structure is read as it runs.

A graph holds one operator that reads the mask and one for each attention. The host waits for what the first has read.
"""

# B batch, H heads, G key heads, T tokens, D width, N = B T tokens of all samples

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.attention import flash_varlen
from flatout.blocks.kernels.attention.recognition import Recognised, recognised
from flatout.blocks.kernels.attention.spans import SpanOptions, spans_of
from flatout.blocks.kernels.attention.structures import band_of
from flatout.blocks.kernels.attention.varlen import varlen_backward, varlen_forward
from flatout.blocks.kernels.opaque import HOST_READS, composed, once, opaque

_plain = torch._C._nn.scaled_dot_product_attention
"""What `torch.nn.functional` calls by the same name, also while something else stands there."""
_NUM_READ: Final = 256
"""Structures that are at hand for backward passes. Those of passes further back are read again."""


def attention_by_dense_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """`F.scaled_dot_product_attention(q, k, v, mask, scale=scale)`, with FlashAttention on the pairs that are seen where the mask
    shows a window or documents.

    `q` is (B, H, T, D), `k` and `v` (B, G, T, D) with H a multiple of G; `mask` broadcasts to (B, H, T, T), bool or added to the
    scores, and needs no gradient. Under autocast its type is autocast's. Where the mask shows no such structure, or the kernel
    does not take the tensors, PyTorch's own attention runs, in the backward pass once more. The gradient cannot be
    differentiated again.
    """
    scale = q.size(-1) ** -0.5 if scale is None else scale
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (t if t.dtype == torch.float64 else t.to(dtype) for t in (q, k, v))
    return _attend(q, k, v, mask, scale)


def when_structure_is_used(listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` whenever such a structure decides what runs; returns how to end that."""
    _listeners.append(listener)
    return lambda: _listeners.remove(listener)


_listeners: list[Callable[[], None]] = []


class _LastMask:
    """A copy of the mask that was read last, kept for the next, and its structure: most are as in the step before."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._structure = Recognised("other", 1.0)

    def structure_of(self, mask: Tensor) -> Recognised:
        last = self._mask
        is_alike = last is not None and (last.shape, last.dtype, last.device) == (mask.shape, mask.dtype, mask.device)
        if last is None or not is_alike or not torch.equal(last, mask):
            self._mask, self._structure = mask.clone(), recognised(mask)
        return self._structure


class _Structures:
    """Structures by the number under which an operator has read them."""

    def __init__(self) -> None:
        self._last, self._numbers = _LastMask(), count()
        self._by_number: OrderedDict[int, Recognised] = OrderedDict()

    def add(self, mask: Tensor) -> int:
        number = next(self._numbers)
        self._by_number[number] = self._last.structure_of(mask)
        while len(self._by_number) > _NUM_READ:
            self._by_number.popitem(last=False)
        return number

    def find(self, number: Tensor, mask: Tensor) -> Recognised:
        found = self._by_number.get(int(number))
        return self._last.structure_of(mask) if found is None else found


_structures = _Structures()


@opaque(
    "dense_mask_structure(Tensor mask) -> Tensor",
    lambda mask: torch.empty((), dtype=torch.int64, device="cpu"),
    tags=HOST_READS,
)
def _structure(mask: Tensor) -> Tensor:
    """The number of the structure."""
    return torch.tensor(_structures.add(mask))


@opaque(
    "attention_by_dense_mask_forward(Tensor q, Tensor k, Tensor v, Tensor mask, Tensor number, SymInt batch, float scale) "
    "-> Tensor[]",
    lambda q, *others: [torch.empty_like(q), q.new_empty((q.size(1), q.size(0)), dtype=torch.float32)],
    tags=HOST_READS,
)
def _forward(
    q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, mask: Tensor, number: Tensor, batch: int, scale: float
) -> list[Tensor]:
    """The result (N, H, D), and the logsumexp of each query's scores (H, N) where the kernel's backward pass wants it."""
    q, k, v = (_heads(t, batch) for t in (q_NHD, k_NGD, v_NGD))
    options = _options(q, k, v, _structures.find(number, mask), scale)
    if options is None:
        out = _plain(q, k, v, _as_taken(mask, q), scale=scale, enable_gqa=q.size(1) != k.size(1))
        return [_rows(out), q.new_zeros((q.size(1), q_NHD.size(0)), dtype=torch.float32)]
    for listener in _listeners:
        listener()
    return list(varlen_forward(q_NHD, k_NGD, v_NGD, options))


@opaque(
    "attention_by_dense_mask_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor mask, Tensor number, Tensor out, "
    "Tensor lse, SymInt batch, float scale) -> Tensor[]",
    lambda grad, q, k, v, *others: [torch.empty_like(t) for t in (q, k, v)],
    tags=HOST_READS,
)
def _backward(
    grad_NHD: Tensor,
    q_NHD: Tensor,
    k_NGD: Tensor,
    v_NGD: Tensor,
    mask: Tensor,
    number: Tensor,
    out_NHD: Tensor,
    lse_HN: Tensor,
    batch: int,
    scale: float,
) -> list[Tensor]:
    grad, q, k, v = (_heads(t, batch) for t in (grad_NHD, q_NHD, k_NGD, v_NGD))
    options = _options(q, k, v, _structures.find(number, mask), scale)
    if options is None:
        return [_rows(t) for t in _computed_again(grad, q, k, v, mask, scale)]
    return list(varlen_backward(grad_NHD, q_NHD, k_NGD, v_NGD, out_NHD, lse_HN, options))


def _options(q: Tensor, k: Tensor, v: Tensor, found: Recognised, scale: float) -> SpanOptions | None:
    """How FlashAttention is called; None where it cannot be taken."""
    if found.mask is None or flash_varlen.refusal(q, k, v, mask=found.mask, score=None, scale=scale) is not None:
        return None
    band = band_of(found.mask)
    assert band is not None
    spans = spans_of(band, found.mask, q.size(0), q.size(2), q.device)
    return SpanOptions(spans, band.left, band.right, scale)


def _computed_again(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Sequence[Tensor]:
    with torch.enable_grad():
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = _plain(q, k, v, _as_taken(mask, q), scale=scale, enable_gqa=q.size(1) != k.size(1))
        return torch.autograd.grad(out, (q, k, v), grad)


def _as_taken(mask: Tensor, q: Tensor) -> Tensor:
    """A mask that is added has the type of the queries, as autocast would have given it."""
    return mask if mask.dtype == torch.bool else mask.to(q.dtype)


def _rows(t_BHTD: Tensor) -> Tensor:
    """Tokens of all samples behind one another, (N, H, D), contiguous."""
    return t_BHTD.transpose(1, 2).reshape(-1, t_BHTD.size(1), t_BHTD.size(3)).contiguous()


def _heads(t_NHD: Tensor, batch: int) -> Tensor:
    """(B, H, T, D) of tokens of all samples behind one another."""
    return t_NHD.view(batch, -1, *t_NHD.shape[1:]).transpose(1, 2)


class _ByDenseMask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        # outside of the operator, so that Inductor has the kernels that make them write them like this
        q, k, v, batch = _rows(q), _rows(k), _rows(v), q.size(0)
        number = _structure(mask)
        out, lse = _forward(q, k, v, mask, number, batch, scale)
        ctx.save_for_backward(q, k, v, mask, number, out, lse)
        ctx.how = batch, scale
        return _heads(out, batch)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = _backward(_rows(grad), *ctx.saved_tensors, *ctx.how)
        return (*(_heads(t, ctx.how[0]) for t in grads), None, None)


@composed("attention_by_dense_mask(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor")
def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    out: Tensor = _ByDenseMask.apply(q, k, v, mask, scale)  # type: ignore[no-untyped-call]
    return out
