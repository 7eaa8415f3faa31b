"""The loss with its products in float8 on a GPU, some tokens at a time: three products a chunk, between them two kernels.

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

from flatout.blocks.kernels.float8_formats import (
    FORWARD,
    GRADIENT,
    LARGEST,
    gradient_step,
    step_of,
)
from flatout.blocks.kernels.linear_cross_entropy.gradient import (
    ROWS_ARGUMENTS,
    LossOptions,
    LossPasses,
    loss_of,
    pass_shapes,
)
from flatout.blocks.kernels.linear_cross_entropy.triton import launch_row_losses, scale_in_place
from flatout.blocks.kernels.opaque import opaque, with_dense_rows
from flatout.blocks.kernels.selection import no_triton
from flatout.blocks.training.float8 import MULTIPLE, refusal
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.linear_cross_entropy.float8.on_device.tiles"
_PADDED: Final = 128
"""Classes are filled up to a multiple of so many, with zeros in the weight."""
_TILE: Final = 64
_NUM_WARPS: Final = 2
"""Rows and columns of what a program casts."""
_BLOCK: Final = 128
_MOST: Final = 16384
"""Tokens of a chunk at most: with 50304 classes 1.6 GB of logits, and as much for two copies of their gradient."""


def _refusal(hidden: Tensor, weight: Tensor, *others: Any, **options: Any) -> str | None:
    why = no_triton(hidden, weight, *others, **options)
    if why is not None:
        return why
    if weight.shape[1] % MULTIPLE:
        return f"a width of {weight.shape[1]} is no multiple of {MULTIPLE}, as float8 products want"
    return refusal(hidden.device)


@opaque("linear_cross_entropy_float8_triton" + ROWS_ARGUMENTS, pass_shapes)
def _rows(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None, scales_N: Tensor, *options: Any
) -> list[Tensor]:
    """See ROWS_ARGUMENTS. Tokens that are ignored cost their products, since the host does not know which they are."""
    how = LossOptions(*options)
    num_tokens, vocabulary = len(hidden_ND), len(weight_VD)
    losses_N, like = (
        torch.empty_like(scales_N),
        pass_shapes(hidden_ND, weight_VD, targets_N, bias_V, scales_N, *options),
    )
    if num_tokens == 0 or vocabulary == 0:
        return [losses_N.fill_(math.nan), *(g.zero_() for g in like[1:])]
    more_tokens, more_classes = -num_tokens % MULTIPLE, -vocabulary % _PADDED
    if more_tokens:
        hidden_ND, scales_N = F.pad(hidden_ND, (0, 0, 0, more_tokens)), F.pad(scales_N, (0, more_tokens))
        targets_N = F.pad(targets_N, (0, more_tokens), value=how.ignore_index)
        losses_N = torch.empty_like(scales_N)
    if more_classes:
        weight_VD = F.pad(weight_VD, (0, 0, 0, more_classes))
        bias_V = F.pad(bias_V, (0, more_classes)) if bias_V is not None else None
    gradients = _by_chunks(hidden_ND, weight_VD, targets_N.contiguous(), bias_V, scales_N, losses_N, vocabulary, how)
    return [
        losses_N[:num_tokens],
        *(
            g[: len(to)].to(to.dtype) if need else to
            for g, to, need in zip(gradients, like[1:], how.needs, strict=True)
        ),
    ]


def _by_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None,
    scales_N: Tensor,
    losses_N: Tensor,
    vocabulary: int,
    how: LossOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of hidden, weight and bias, of sizes that the units multiply; `losses_N` is filled."""
    num_tokens, num_classes = len(hidden_ND), len(weight_VD)
    hidden8_ND, hidden8_DN, hidden_step = _cast_twice(hidden_ND)
    weight8_VD, weight8_DV, weight_step = _cast_twice(weight_VD)
    step = gradient_step(scales_N)
    none = hidden_ND.new_empty(0)
    logits_dtype = torch.float16 if how.dtype == torch.float16 else torch.bfloat16
    bias = bias_V.to(logits_dtype) if bias_V is not None else None
    of_hidden = torch.empty(hidden_ND.shape, dtype=logits_dtype, device=hidden_ND.device) if how.needs_hidden else none
    of_weight = none
    of_bias = torch.zeros(num_classes, device=hidden_ND.device) if how.needs_bias else none
    chunk = MULTIPLE * math.ceil(min(how.chunk or _MOST, num_tokens) / MULTIPLE)
    norms_N = torch.empty_like(scales_N)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for start in range(0, num_tokens, chunk):
            at = slice(start, min(start + chunk, num_tokens))
            logits_CV = _product(
                hidden8_ND[at], weight8_VD.t(), hidden_step, weight_step, dtype=logits_dtype, bias=bias
            )
            rows = (logits_CV[:, :vocabulary], targets_N[at], scales_N[at], losses_N[at])
            launch_row_losses(*rows, *how[:4], False, norms_C=norms_N[at])
            if not any(how.needs):
                continue
            small_CV, small_VC = _gradient_twice(
                logits_CV, targets_N[at], scales_N[at], norms_N[at], step, vocabulary, how
            )
            del logits_CV
            if how.needs_hidden:
                of_hidden[at] = _product(small_CV, weight8_DV.t(), step, weight_step, dtype=logits_dtype)
            if how.needs_weight:
                part = _product(small_VC, hidden8_DN[:, at].t(), step, hidden_step, dtype=torch.float32)
                of_weight = part if start == 0 else of_weight.add_(part)
            if how.needs_bias:
                of_bias += small_VC.to(torch.bfloat16).sum(1, dtype=torch.float32) * step
    return of_hidden, of_weight, of_bias


def _product(
    a: Tensor, b: Tensor, a_step: Tensor, b_step: Tensor, *, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """The product of two float8 matrices, the first by rows and the second by columns.

    The logits' sums are kept in fewer bits by the units (fast accumulation); those of gradients, over as many numbers as there
    are classes or tokens, are not.
    """
    is_forward = a.dtype == FORWARD
    return torch._scaled_mm(a, b, a_step, b_step, bias=bias, out_dtype=dtype, use_fast_accum=is_forward)


def _cast_twice(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The matrix in float8, that with rows and columns exchanged, and what 1 stands for in them.

    They are exchanged by a copy: Triton 3.6 mixed up float8 numbers that came from float32 and were exchanged in registers.
    """
    matrix = with_dense_rows(matrix)
    num_rows, num_columns = matrix.shape
    step = step_of(matrix)
    small = torch.empty(num_rows, num_columns, dtype=FORWARD, device=matrix.device)
    source: Any = import_module(_SOURCE)
    block = min(1024, 1 << (num_columns - 1).bit_length())
    sizes = (num_columns, matrix.stride(0), LARGEST)
    source.cast_rows[(num_rows, math.ceil(num_columns / block))](matrix, step, small, *sizes, BLOCK=block, num_warps=4)
    return small, small.view(torch.uint8).t().contiguous().view(FORWARD), step


def _gradient_twice(
    logits_CV: Tensor,
    targets_C: Tensor,
    scales_C: Tensor,
    norms_C: Tensor,
    step: Tensor,
    vocabulary: int,
    how: LossOptions,
) -> tuple[Tensor, Tensor]:
    """The gradient of a chunk's logits in float8, and that with rows and columns exchanged."""
    num_tokens, num_classes = logits_CV.shape
    small = torch.empty(num_tokens, num_classes, dtype=GRADIENT, device=logits_CV.device)
    exchanged = torch.empty(num_classes, num_tokens, dtype=GRADIENT, device=logits_CV.device)
    source: Any = import_module(_SOURCE)
    arguments = (
        *(logits_CV, targets_C, scales_C, norms_C, step, small, exchanged),
        *(num_tokens, vocabulary, num_classes),
        *(how.ignore_index, how.label_smoothing, how.z_loss, how.softcap),
    )
    options = {"HAS_CAP": how.softcap != 0.0, "HAS_SMOOTHING": how.label_smoothing != 0.0}
    source.gradient_twice[(math.ceil(num_tokens / _TILE), num_classes // _TILE)](
        *arguments,
        **options,
        IS_EVEN=num_tokens % _TILE == 0,
        ROWS=_TILE,
        COLUMNS=_TILE,
        num_warps=_NUM_WARPS,
    )
    source.gradient_of_targets[(math.ceil(num_tokens / _BLOCK),)](*arguments, **options, BLOCK=_BLOCK, num_warps=4)
    return small, exchanged


KERNEL = kernel(
    __name__,
    "In chunks of tokens, products in float8, gradients of the logits cast where they are made",
    partial(loss_of, LossPasses(_rows, scale_in_place)),
    order=100,
    refusal=_refusal,
    guarantee="quality",
)
