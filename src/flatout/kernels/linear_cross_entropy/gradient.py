"""The loss and its gradients made together, in the forward pass, so that no product is done twice.

N tokens, D width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.kernels.once import once

ROWS_ARGUMENTS: Final = (
    "(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, Tensor scales, int ignore_index, float label_smoothing, "
    "float z_loss, float softcap, int chunk, ScalarType dtype, bool needs_hidden, bool needs_weight, bool needs_bias) -> Tensor[]"
)
"""What a pass over all chunks takes: `scales` (N,) multiplies the gradient of each token's logits, `softcap` is 0 for none,
`chunk` 0 for one that suits, `dtype` that of the products. It returns the losses of the tokens, and the gradients of hidden,
weight and bias, empty where they are not needed; in the dtype of what they are gradients of, or float32 of the weight and bias
when the products are float16."""


class Way(NamedTuple):
    """One implementation: its pass over the chunks, and its product in place with a number on the device."""

    rows: Callable[..., list[Tensor]]
    scale: Callable[[Tensor, Tensor], Tensor]


class Loss(NamedTuple):
    """What loss is meant, and which gradients are needed of hidden, weight and bias."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    chunk: int
    reduction: str
    dtype: torch.dtype
    needs: tuple[bool, bool, bool]

    @property
    def is_late(self) -> bool:
        """The mean's divisor is applied in the backward pass: a probability over N would be lost in float16, whose least number
        is 6e-8, and GradScaler's factor comes only there."""
        return self.dtype == torch.float16 and self.reduction == "mean"

    def rows(self, way: Way, inputs: Inputs, scales_N: Tensor, needs: tuple[bool, bool, bool]) -> list[Tensor]:
        hidden_ND, weight_VD, targets_N, bias_V = inputs
        how = (self.ignore_index, self.label_smoothing, self.z_loss, self.softcap, self.chunk, self.dtype)
        return way.rows(hidden_ND, weight_VD, targets_N, bias_V, scales_N, *how, *needs)


Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


def shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, scales: Tensor, *how: Any
) -> list[Tensor]:
    """What a pass returns, without numbers."""
    dtype: torch.dtype = how[5]
    wide = torch.float32 if dtype == torch.float16 else None
    none = hidden.new_empty(0)
    return [
        scales.new_empty(targets.shape),
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if how[-3] else none,
        torch.empty_like(weight, dtype=wide, memory_format=torch.contiguous_format) if how[-2] else none.clone(),
        torch.empty_like(bias, dtype=wide) if how[-1] and bias is not None else none.clone(),
    ]


def loss_of(
    way: Way,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """The reference's loss, by this implementation; gradients are made only where autograd records."""
    kind = hidden_ND.device.type
    is_recorded = torch.is_grad_enabled()
    loss = Loss(
        ignore_index,
        label_smoothing,
        z_loss,
        softcap if softcap is not None else 0.0,
        chunk if chunk is not None else 0,
        reduction,
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype,
        (
            is_recorded and hidden_ND.requires_grad,
            is_recorded and weight_VD.requires_grad,
            is_recorded and bias_V is not None and bias_V.requires_grad,
        ),
    )
    inputs = (hidden_ND, weight_VD, targets_N, bias_V)
    result: Tensor = _LinearCrossEntropy.apply(*inputs, way, loss)  # type: ignore[no-untyped-call]
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        bias_V: Tensor | None,
        way: Way,
        loss: Loss,
    ) -> Tensor:
        ctx.way, ctx.loss = way, loss
        inputs = (hidden_ND, weight_VD, targets_N, bias_V)
        kept_N = targets_N != loss.ignore_index
        scales_N = kept_N.to(torch.float64 if loss.dtype == torch.float64 else torch.float32)
        share = scales_N.sum().reciprocal() if loss.reduction == "mean" else scales_N.new_ones(())
        if loss.reduction == "none":
            ctx.save_for_backward(*inputs)
            return loss.rows(way, inputs, scales_N, (False, False, False))[0]
        if loss.reduction == "mean" and not loss.is_late:
            scales_N = scales_N * share
        losses_N, *gradients = loss.rows(way, inputs, scales_N, loss.needs)
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype, bias_V.dtype if bias_V is not None else None
        ctx.save_for_backward(share, *gradients)
        return losses_N.sum() * share

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        way, loss = ctx.way, ctx.loss
        if loss.reduction == "none":
            losses_and_gradients = loss.rows(way, ctx.saved_tensors, grad.contiguous(), loss.needs)
            dtypes = [t.dtype if t is not None else None for t in ctx.saved_tensors]
            dtypes.pop(2)
            made = [g.to(dtype) for g, dtype in zip(losses_and_gradients[1:], dtypes, strict=True)]
        else:
            share, *gradients = ctx.saved_tensors
            # Where nothing is kept the share is infinite, and the gradients are 0.
            factor = grad * share.where(share.isfinite(), 0.0) if loss.is_late else grad
            made = [_scaled(way, g, factor, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        hidden, weight, bias = (g if is_needed else None for g, is_needed in zip(made, loss.needs, strict=True))
        return hidden, weight, None, bias, None, None


def _scaled(way: Way, gradient: Tensor, factor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The product, in the gradient's own memory when nobody will ask for it again, in `dtype`.

    A second backward pass of a graph that is kept needs the gradient as it was; a compiled graph decides for itself.
    """
    is_traced = type(gradient) is not Tensor
    if is_traced or torch._C._autograd._get_current_graph_task_keep_graph():
        scaled = gradient * factor
    else:
        scaled = way.scale(gradient, factor)
    return scaled if dtype is None else scaled.to(dtype)
