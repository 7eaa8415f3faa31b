"""Blocks of rows that stay in a CPU's cache while operator after operator passes over them.

R rows, D width, B rows of a block. PyTorch's own on a CPU is several operators over whole arrays, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import once, opaque
from flatout.core.parts import kernel

_BLOCK: Final = 1 << 17
"""Numbers of a block, 512 KiB of float32. Forward and backward on an EPYC core, 2048 x 1024, over F.rms_norm's time: 0.35 with
2^15, 0.30 with 2^17, 0.32 with 2^18; 512 x 4096: 0.35, 0.27, 0.30."""


def _forward_shapes(x_RD: Tensor, weight_D: Tensor | None, eps: float) -> list[Tensor]:
    wide = torch.promote_types(x_RD.dtype, torch.float32)
    return [
        torch.empty_like(x_RD, memory_format=torch.contiguous_format),
        x_RD.new_empty(x_RD.shape[0], 1, dtype=wide),
    ]


@opaque("rms_norm_blocked(Tensor x, Tensor? weight, float eps) -> Tensor[]", _forward_shapes)
def _forward(x_RD: Tensor, weight_D: Tensor | None, eps: float) -> list[Tensor]:
    """What is normed, and by what: the reciprocal roots of the mean squares."""
    normed_RD, factors_R1 = _forward_shapes(x_RD, weight_D, eps)
    wide = factors_R1.dtype
    weight = weight_D.to(wide) if weight_D is not None else None
    for rows in _blocks(x_RD):
        x_BD, factors_B1 = x_RD[rows].to(wide), factors_R1[rows]
        torch.linalg.vector_norm(x_BD, dim=-1, keepdim=True, out=factors_B1)
        factors_B1.square_().div_(x_RD.shape[1]).add_(eps).rsqrt_()
        into_BD = normed_RD[rows] if wide == normed_RD.dtype else x_BD
        torch.mul(x_BD, factors_B1, out=into_BD)
        if weight is not None:
            into_BD.mul_(weight)
        if into_BD is x_BD:
            normed_RD[rows] = into_BD
    return [normed_RD, factors_R1]


def _backward_shapes(grad_RD: Tensor, x_RD: Tensor, weight_D: Tensor | None, factors_R1: Tensor) -> list[Tensor]:
    return [
        torch.empty_like(x_RD, memory_format=torch.contiguous_format),
        torch.empty_like(weight_D) if weight_D is not None else x_RD.new_empty(0),
    ]


@opaque(
    "rms_norm_blocked_backward(Tensor grad, Tensor x, Tensor? weight, Tensor factors) -> Tensor[]", _backward_shapes
)
def _backward(grad_RD: Tensor, x_RD: Tensor, weight_D: Tensor | None, factors_R1: Tensor) -> list[Tensor]:
    """With u the normed rows without their weight and g = grad * weight: `factor * (g - u mean(g u))`, and `sum(grad u)`."""
    grad_in_RD = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    wide, width = factors_R1.dtype, x_RD.shape[1]
    weight = weight_D.to(wide) if weight_D is not None else torch.ones(width, dtype=wide)
    weight_sum_D = torch.zeros(width, dtype=wide)
    for rows in _blocks(x_RD):
        grad_BD, factors_B1 = grad_RD[rows].to(wide), factors_R1[rows]
        units_BD = x_RD[rows].to(wide) * factors_B1
        products_BD = units_BD * grad_BD
        weight_sum_D += products_BD.sum(dim=0)
        shares_B1 = (products_BD @ weight).unsqueeze(1).div_(-width)
        into_BD = grad_in_RD[rows] if grad_in_RD.dtype == wide else products_BD
        torch.mul(grad_BD, weight, out=into_BD).addcmul_(units_BD, shares_B1).mul_(factors_B1)
        if into_BD is products_BD:
            grad_in_RD[rows] = into_BD
    return [grad_in_RD, weight_sum_D.to(weight_D.dtype) if weight_D is not None else x_RD.new_empty(0)]


def _blocks(x_RD: Tensor) -> Iterator[slice]:
    num_rows, width = x_RD.shape
    step = max(1, _BLOCK // max(1, width))
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        normed_RD, factors_R1 = _forward(x_RD, weight_D, eps)
        ctx.save_for_backward(x_RD, weight_D, factors_R1)
        return normed_RD  # type: ignore[no-any-return]

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, weight_D, factors_R1 = ctx.saved_tensors
        grad_in_RD, weight_grad_D = _backward(grad, x_RD, weight_D, factors_R1)
        return grad_in_RD, weight_grad_D if weight_D is not None else None, None


def blocked_rms_norm(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result. Its gradient cannot be differentiated again."""
    summed = x if residual is None else x + residual
    normed_RD: Tensor = _RmsNorm.apply(summed.reshape(-1, summed.shape[-1]), weight_D, eps)  # type: ignore[no-untyped-call]
    normed = normed_RD.view(summed.shape)
    return normed if residual is None else (normed, summed)


def refusal(x: Tensor, *others: Tensor | None, **options: object) -> str | None:
    """CPUs, and something in a row."""
    if x.device.type != "cpu":
        return f"x is on '{x.device}'; blocks of rows are for a CPU's cache"
    return "rows are empty" if x.shape[-1] == 0 else None


KERNEL = kernel(
    __name__, "Blocks of rows in a CPU's cache", blocked_rms_norm, order=300, refusal=refusal, name="blocked"
)
