"""The loss some tokens at a time on a GPU: three products a chunk by PyTorch, all between them by one kernel.

N tokens, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.forced import no_triton
from flatout.kernels.linear_cross_entropy.gradient import ROWS_ARGUMENTS, Way, loss_of, shapes
from flatout.kernels.linear_cross_entropy.products import Gradients
from flatout.kernels.linear_cross_entropy.sizes import device_chunk
from flatout.kernels.opaque import opaque
from flatout.records.kernel import Kernel

_SOURCE: Final = "flatout.kernels.linear_cross_entropy.on_device.row_losses"
_BLOCK: Final = 8192
_NUM_WARPS: Final = 32
"""Logits that a program holds at once, 8 a thread beside as many maxima and sums: one load of 16 bytes, and no register spilled
(compiled for sm_90: 38 of 64, with a soft cap 48)."""
_ALIGNED: Final = 64
"""Vocabularies are filled up to a multiple of so many classes, with zeros in the weight. The matrix units' fast paths want sizes
and rows of 16 bytes: three products with 50257 classes took 29 ms on an H200, with 50304 a third of it."""


@opaque("linear_cross_entropy_triton" + ROWS_ARGUMENTS, shapes)
def rows(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None,
    scales_N: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> list[Tensor]:
    """See ROWS_ARGUMENTS. Rows that are ignored get zeros; their products are done, since the host does not know which they
    are."""
    hidden, weight = hidden_ND.to(dtype), weight_VD.to(dtype)
    bias = bias_V.to(dtype) if bias_V is not None else None
    (num_tokens, width), vocabulary = hidden.shape, len(weight)
    row_stride = math.ceil(vocabulary / _ALIGNED) * _ALIGNED
    if row_stride > vocabulary:  # one copy of the weight, for three products of aligned sizes in each chunk
        weight = F.pad(weight, (0, 0, 0, row_stride - vocabulary))
        bias = F.pad(bias, (0, row_stride - vocabulary)) if bias is not None else None
    chunk = chunk or device_chunk(num_tokens=num_tokens, width=width)
    needs = (needs_hidden, needs_weight, needs_bias)
    options = (ignore_index, label_smoothing, z_loss, softcap, any(needs))
    losses_N, targets_N = torch.empty_like(scales_N), targets_N.contiguous()
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = Gradients(
            hidden, weight, needs=needs, weight_dtype=weight_VD.dtype, num_chunks=math.ceil(num_tokens / chunk)
        )
        buffer = torch.empty(min(chunk, num_tokens), row_stride, dtype=dtype, device=hidden.device)
        for start in range(0, num_tokens, chunk):
            at = slice(start, min(start + chunk, num_tokens))
            logits = buffer[: at.stop - start]
            if bias is None:
                torch.mm(hidden[at], weight.t(), out=logits)
            else:
                torch.addmm(bias, hidden[at], weight.t(), out=logits)
            row_losses(logits[:, :vocabulary], targets_N[at], scales_N[at], losses_N[at], *options)
            if any(needs):
                gradients.add(at, logits)
        del buffer
    # The gradients of float16 products come unscaled, wide as they were summed.
    wanted = (weight_VD.dtype, bias_V.dtype if bias_V is not None else None) if dtype != torch.float16 else (None, None)
    of_hidden, of_weight, of_bias = gradients.results(hidden_ND.dtype, *wanted)
    return [losses_N, of_hidden, of_weight[:vocabulary], of_bias[:vocabulary]]


def row_losses(
    logits_CV: Tensor,
    targets_C: Tensor,
    scales_C: Tensor,
    losses_C: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    has_gradient: bool,
    *,
    block: int = _BLOCK,
    num_warps: int = _NUM_WARPS,
) -> None:
    """Fills the losses and, when asked for, writes the gradient over the logits, and zeros between their rows."""
    num_tokens, vocabulary = logits_CV.shape
    if num_tokens == 0 or vocabulary == 0:
        losses_C.fill_(float("nan"))
        return
    source: Any = import_module(_SOURCE)
    block = min(block, 1 << (vocabulary - 1).bit_length())
    source.row_losses[(num_tokens,)](
        logits_CV,
        targets_C,
        scales_C,
        losses_C,
        logits_CV.stride(0),
        vocabulary,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        HAS_CAP=softcap != 0.0,
        HAS_SMOOTHING=label_smoothing != 0.0,
        HAS_GRADIENT=has_gradient,
        BLOCK=block,
        num_warps=max(1, min(num_warps, block // 256)),
    )


def scale(gradient: Tensor, factor: Tensor) -> Tensor:
    """The product, in the gradient's memory; untouched when the factor is 1, which the host need not know."""
    if gradient.numel():
        source: Any = import_module(_SOURCE)
        block = 8192
        source.scale[(math.ceil(gradient.numel() / block),)](
            gradient, factor, gradient.numel(), BLOCK=block, num_warps=8
        )
    return gradient


def refusal(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None = None, **options: object
) -> str | None:
    """GPUs, and at most 32 bits a number."""
    return no_triton(hidden_ND, weight_VD, targets_N, bias_V)


KERNEL = Kernel(
    id="linear_cross_entropy.triton",
    op="linear_cross_entropy",
    title="In chunks of tokens, losses and gradients of the logits by one Triton kernel",
    module=__name__,
    run=partial(loss_of, Way(rows, scale)),
    refusal=refusal,
    order=100,
)
