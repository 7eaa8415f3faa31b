"""The loss of float8 products, all logits at once and multiplied in float32: what the other kernel must return.

N tokens, D width, V vocabulary
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.blocks.kernels.float8_formats import GRADIENT, float8_of, gradient_step
from flatout.blocks.kernels.linear_cross_entropy.gradient import (
    ROWS_ARGUMENTS,
    LossOptions,
    LossPasses,
    loss_of,
    pass_shapes,
)
from flatout.blocks.kernels.linear_cross_entropy.reference import losses_of_logits
from flatout.blocks.kernels.opaque import opaque
from flatout.core.parts import kernel


@opaque("linear_cross_entropy_float8_reference" + ROWS_ARGUMENTS, pass_shapes)
def _rows(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, bias_V: Tensor | None, scales_N: Tensor, *options: Any
) -> list[Tensor]:
    """See ROWS_ARGUMENTS."""
    how = LossOptions(*options)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        hidden8, weight8 = float8_of(hidden_ND), float8_of(weight_VD)
        hidden = hidden8.values.float() * hidden8.scale
        weight = weight8.values.float() * weight8.scale
        logits_NV = hidden @ weight.t()
        if bias_V is not None:
            logits_NV = logits_NV + bias_V.float()
        logits_NV = logits_NV.to(_logits_dtype(how.dtype)).float()
        losses_N, d_NV = _losses(logits_NV, targets_N, scales_N, how)
        step = gradient_step(scales_N)
        d_NV = (d_NV / step).to(GRADIENT).float() * step
    like = pass_shapes(hidden_ND, weight_VD, targets_N, bias_V, scales_N, *options)
    results = (losses_N, d_NV @ weight, d_NV.t() @ hidden, d_NV.sum(0))
    return [
        result.to(shape.dtype) if is_needed else shape
        for result, shape, is_needed in zip(results, like, (True, *how.needs), strict=True)
    ]


def _logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """Logits leave the units in 16 bits, as under autocast: in float16 where products are, else in bfloat16."""
    return torch.float16 if dtype == torch.float16 else torch.bfloat16


def _losses(logits_NV: Tensor, targets_N: Tensor, scales_N: Tensor, how: LossOptions) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the gradient of the logits of their sum, weighted by `scales_N`.

    Written out, since an operator is called where autograd does not record.
    """
    losses_N = losses_of_logits(
        logits_NV,
        targets_N,
        ignore_index=how.ignore_index,
        label_smoothing=how.label_smoothing,
        z_loss=how.z_loss,
        softcap=how.softcap or None,
    )
    z_NV = how.softcap * torch.tanh(logits_NV / how.softcap) if how.softcap else logits_NV
    norms_N1 = z_NV.logsumexp(dim=1, keepdim=True)
    is_counted_N1 = (targets_N != how.ignore_index).unsqueeze(1)
    wanted_NV = torch.zeros_like(z_NV).scatter_(1, targets_N.unsqueeze(1).where(is_counted_N1, 0), 1.0)
    wanted_NV = (1 - how.label_smoothing) * wanted_NV + how.label_smoothing / z_NV.shape[1]
    gradient_NV = (1 + 2 * how.z_loss * norms_N1) * (z_NV - norms_N1).exp() - wanted_NV
    if how.softcap:
        gradient_NV = gradient_NV * (1 - (z_NV / how.softcap).square())
    return losses_N, (gradient_NV * scales_N.unsqueeze(1)).where(is_counted_N1, 0.0)


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    return gradient.mul_(factor)


KERNEL = kernel(
    __name__,
    "All logits at once, products of rounded numbers in float32",
    partial(loss_of, LossPasses(_rows, _scale)),
    order=1000,
    guarantee="quality",
)
