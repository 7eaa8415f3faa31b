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

from flatout.blocks.kernels.linear_cross_entropy.gradient import (
    ROWS_ARGUMENTS,
    LossOptions,
    LossPasses,
    gradients_by_chunks,
    loss_of,
    pass_shapes,
)
from flatout.blocks.kernels.linear_cross_entropy.sizes import device_chunk
from flatout.blocks.kernels.opaque import opaque
from flatout.blocks.kernels.selection import no_triton
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.linear_cross_entropy.on_device.row_losses"
_BLOCK: Final = 2048
_GROUP: Final = 8
_NUM_WARPS: Final = 8
"""Logits that a program holds at once, 8 a thread: one load of 16 bytes. Of 16,384 rows of 50,304 logits in bfloat16, an H200
makes losses and gradients in 1.22 ms and losses alone in 0.41 ms (with 8,192, a maximum a logit and 32 warps in 1.53 and 0.79 ms;
bench/results/2026-11-27-h200/float8_loss.txt)."""
_ALIGNED: Final = 64
"""Vocabularies are filled up to a multiple of so many classes, with zeros in the weight. The matrix units' fast paths want sizes
and rows of 16 bytes: three products with 50257 classes took 29 ms on an H200, with 50304 a third of it."""


@opaque("linear_cross_entropy_triton" + ROWS_ARGUMENTS, pass_shapes)
def _rows(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None, scales_N: Tensor, *options: Any
) -> list[Tensor]:
    """See ROWS_ARGUMENTS. Rows that are ignored get zeros; their products are done, since the host does not know which they
    are."""
    how = LossOptions(*options)
    hidden, weight = hidden_ND.to(how.dtype), weight_VD.to(how.dtype)
    bias = bias_V.to(how.dtype) if bias_V is not None else None
    (num_tokens, width), vocabulary = hidden.shape, len(weight)
    if vocabulary % _ALIGNED:  # one copy of the weight, for three products of aligned sizes in each chunk
        num_more = -vocabulary % _ALIGNED
        weight = F.pad(weight, (0, 0, 0, num_more))
        bias = F.pad(bias, (0, num_more)) if bias is not None else None
    losses_N, targets_N = torch.empty_like(scales_N), targets_N.contiguous()

    def losses(at: slice, logits: Tensor) -> None:
        rows = (logits[:, :vocabulary], targets_N[at], scales_N[at], losses_N[at])
        launch_row_losses(*rows, *how[:4], any(how.needs))

    chunk = how.chunk or device_chunk(num_tokens=num_tokens, width=width)
    dtypes = (hidden_ND.dtype, weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
    of_hidden, *others = gradients_by_chunks(hidden, weight, bias, losses, how=how, chunk=chunk, dtypes=dtypes)
    return [losses_N, of_hidden, *(gradient[:vocabulary] for gradient in others)]


def launch_row_losses(
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
    norms_C: Tensor | None = None,
    block: int = _BLOCK,
    group: int = _GROUP,
    num_warps: int = _NUM_WARPS,
    rows_at_once: int = 0,
    is_reread: bool = False,
) -> None:
    """Fills the losses, and the logsumexps where `norms_C` is for them (not those of tokens that are ignored).

    When asked for, writes the gradient over the logits, and zeros between their rows. At most `rows_at_once` programs run (0: one
    a row); with `is_reread` the cache is asked to hold a row until it has been read again for the gradient.
    """
    num_tokens, vocabulary = logits_CV.shape
    if num_tokens == 0 or vocabulary == 0:
        losses_C.fill_(float("nan"))
        return
    source: Any = import_module(_SOURCE)
    block = min(block, 1 << (vocabulary - 1).bit_length())
    source.row_losses[(min(num_tokens, rows_at_once or num_tokens),)](
        *(logits_CV, targets_C, scales_C, losses_C, losses_C if norms_C is None else norms_C),
        num_tokens,
        logits_CV.stride(0),
        vocabulary,
        *(ignore_index, label_smoothing, z_loss, softcap),
        HAS_CAP=softcap != 0.0,
        HAS_SMOOTHING=label_smoothing != 0.0,
        HAS_GRADIENT=has_gradient,
        HAS_NORMS=norms_C is not None,
        BLOCK=block,
        GROUP=min(group, block),
        FIRST_READ="evict_last" if is_reread and has_gradient else "",
        LAST_READ="evict_first" if is_reread and has_gradient else "",
        num_warps=max(1, min(num_warps, block // 256)),
    )


def scale_in_place(gradient: Tensor, factor: Tensor) -> Tensor:
    """The product, in the gradient's memory; untouched when the factor is 1, which the host need not know."""
    if gradient.numel():
        source: Any = import_module(_SOURCE)
        block = 8192
        source.scale[(math.ceil(gradient.numel() / block),)](
            gradient, factor, gradient.numel(), BLOCK=block, num_warps=8
        )
    return gradient


KERNEL = kernel(
    __name__,
    "In chunks of tokens, losses and gradients of the logits by one Triton kernel",
    partial(loss_of, LossPasses(_rows, scale_in_place)),
    order=100,
    refusal=no_triton,
)
