"""One product of the inputs, with the adapter added to the weight.

What it saves are passes over the results of the adapter's wide products: forward `up`'s, written and added to the layer's
[N, O]; backward that of `down`, the gradient of x, [N, I]. What it costs are passes over the weight [O, I], about as many, so
that it pays from O I / (O + I) rows on. On two cores of a Xeon, in float32, a layer's forward and backward are 1.03 times as fast
at that bound (512 rows of 1024 to 1024), and 1.12 times at 2048 rows of 512 to 2048
(bench/results/2026-11-30-xeon-family6-2-cores/lora_linear.json).

N rows, I inputs, O outputs, R rank
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.lora_linear.sizes import has_enough_rows
from flatout.core.parts import kernel


def merged_lora_linear(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """The reference's result, by one product of x."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    with torch.autocast(kind, enabled=False):
        cast = [t if t is None else t.to(dtype) for t in (x, down, up, bias)]
        result: Tensor = _MergedLinear.apply(weight, *cast, scale)  # type: ignore[no-untyped-call]
        return result


class _MergedLinear(torch.autograd.Function):
    """Of inputs in one dtype, but for the weight."""

    @staticmethod
    def forward(
        ctx: Any, weight_OI: Tensor, x: Tensor, down_RI: Tensor, up_OR: Tensor, bias_O: Tensor | None, scale: float
    ) -> Tensor:
        ctx.scale = scale
        # In place: the sum is formed in the wider dtype of the two and rounded once.
        merged_OI = torch.mm(up_OR * scale, down_RI).add_(weight_OI)
        ctx.save_for_backward(weight_OI, x, down_RI, up_OR, merged_OI)
        return F.linear(x, merged_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, x, down_RI, up_OR, merged_OI = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated again, by all that the sum is made of
            merged_OI = torch.mm(up_OR * ctx.scale, down_RI) + weight_OI.to(x.dtype)
        grad_NO, x_NI = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        needs_weight, needs_x, needs_down, needs_up, needs_bias, _ = ctx.needs_input_grad
        return (
            (grad_NO.t() @ x_NI).to(weight_OI.dtype) if needs_weight else None,
            (grad_NO @ merged_OI).view(x.shape) if needs_x else None,
            (grad_NO @ up_OR * ctx.scale).t() @ x_NI if needs_down else None,
            grad_NO.t() @ (x_NI @ down_RI.t() * ctx.scale) if needs_up else None,
            grad_NO.sum(0) if needs_bias else None,
            None,
        )


def _refusal(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, *, scale: float = 1.0
) -> str | None:
    num_out, num_in = weight.shape
    rows = x.numel() // max(1, num_in)
    if has_enough_rows(rows, num_out=num_out, num_in=num_in):
        return None
    return f"with {rows} rows, passes over a weight of {num_out} x {num_in} cost more than those over the results"


KERNEL = kernel(
    __name__, "One product, the adapter added to the weight", merged_lora_linear, refusal=_refusal, order=500
)
