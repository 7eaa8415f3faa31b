"""The loss some tokens at a time, by PyTorch's own operators: what a CPU runs.

N tokens, K of them kept, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.blocks.kernels.linear_cross_entropy.gradient import (
    ROWS_ARGUMENTS,
    LossOptions,
    LossPasses,
    gradients_by_chunks,
    loss_of,
    pass_shapes,
)
from flatout.blocks.kernels.linear_cross_entropy.sizes import device_chunk, host_chunk
from flatout.blocks.kernels.opaque import opaque
from flatout.core.parts import kernel


@opaque("linear_cross_entropy_chunked" + ROWS_ARGUMENTS, pass_shapes)
def _rows(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None, scales_N: Tensor, *options: Any
) -> list[Tensor]:
    """See ROWS_ARGUMENTS."""
    how = LossOptions(*options)
    counted_K = _counted(targets_N, how.ignore_index)
    hidden_KD, targets_K, scales_K = hidden_ND[counted_K].to(how.dtype), targets_N[counted_K], scales_N[counted_K]
    is_counted_K = targets_K != how.ignore_index
    places_K = targets_K.where(is_counted_K, 0)
    losses_K = torch.empty_like(scales_K)

    def losses(at: slice, logits_CV: Tensor) -> None:
        wide_CV = logits_CV.to(scales_N.dtype)
        capped_CV = wide_CV.div_(how.softcap).tanh_().mul_(how.softcap).clone() if how.softcap else None
        losses_K[at], norms_C1, totals_C1 = _losses(wide_CV, places_K[at], how.label_smoothing, how.z_loss)
        if not any(how.needs):
            return
        factors_C1 = scales_K[at].where(is_counted_K[at], 0.0).unsqueeze(1)
        wide_CV.mul_(factors_C1 * (1 + 2 * how.z_loss * norms_C1) / totals_C1)
        _less_targets(wide_CV, places_K[at], factors_C1, how.label_smoothing)
        if capped_CV is not None:
            wide_CV.mul_(1 - capped_CV.div_(how.softcap).square_())
        if wide_CV is not logits_CV:
            logits_CV.copy_(wide_CV)

    num_tokens, width = hidden_KD.shape
    suits = host_chunk(num_tokens=num_tokens, vocabulary=len(weight_VD))
    chunk = how.chunk or (suits if hidden_KD.is_cpu else device_chunk(num_tokens=num_tokens, width=width))
    bias = bias_V.to(how.dtype) if bias_V is not None else None
    dtypes = (hidden_ND.dtype, weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
    weight = weight_VD.to(how.dtype)
    hidden, *others = gradients_by_chunks(hidden_KD, weight, bias, losses, how=how, chunk=chunk, dtypes=dtypes)
    losses_N = torch.zeros_like(scales_N)
    losses_N[counted_K] = losses_K.where(is_counted_K, 0.0)
    if how.needs_hidden and not isinstance(counted_K, slice):
        hidden = torch.zeros_like(hidden_ND, memory_format=torch.contiguous_format).index_copy_(0, counted_K, hidden)
    return [losses_N, hidden, *others]


def _counted(targets_N: Tensor, ignore_index: int) -> Tensor | slice:
    """The rows that cost products. On a device the host would have to wait for their number; there all do."""
    if targets_N.is_cpu:
        is_counted_N = targets_N != ignore_index
        if not is_counted_N.all():
            return is_counted_N.nonzero().squeeze(1)
    return slice(None)


def _losses(
    logits_CV: Tensor, places_C: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, the logsumexps, and the sums of what the logits become: exponentials, the largest 1."""
    own_C1 = logits_CV.gather(1, places_C.unsqueeze(1))
    mean_C1 = logits_CV.mean(dim=1, keepdim=True) if label_smoothing else 0.0
    top_C1 = logits_CV.amax(dim=1, keepdim=True)
    totals_C1 = logits_CV.sub_(top_C1).exp_().sum(dim=1, keepdim=True)
    norms_C1 = top_C1 + totals_C1.log()
    losses_C1 = norms_C1 - (1 - label_smoothing) * own_C1 - label_smoothing * mean_C1
    if z_loss:
        losses_C1 = losses_C1 + z_loss * norms_C1.square()
    return losses_C1.squeeze(1), norms_C1, totals_C1


def _less_targets(gradient_CV: Tensor, places_C: Tensor, factors_C1: Tensor, label_smoothing: float) -> None:
    """Takes the distribution that was wanted from the one that was given."""
    if label_smoothing:
        gradient_CV.sub_(factors_C1 * (label_smoothing / gradient_CV.shape[1]))
    gradient_CV.scatter_add_(1, places_C.unsqueeze(1), factors_C1 * (label_smoothing - 1))


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    if factor.is_cpu and factor.item() == 1.0:
        return gradient
    return gradient.mul_(factor)


KERNEL = kernel(
    __name__,
    "In chunks of tokens, by PyTorch's operators",
    partial(loss_of, LossPasses(_rows, _scale)),
    order=500,
    name="chunked",
)
