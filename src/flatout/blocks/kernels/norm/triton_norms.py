"""Both norms by Triton: the operators, their gradient, and how many programs run.

R rows, D width, P parts of a sum over rows
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import Side, once, opaque, with_dense_rows

_SOURCE: Final = "flatout.blocks.kernels.norm.on_device.rows"
_WIDEST: Final = 16384
"""Numbers that a program holds at once; wider rows are read in blocks, more than once."""
_WIDE_BLOCK: Final = 4096
_FORWARD_PER_WARP, _BACKWARD_PER_WARP = 512, 256
"""Numbers of a warp, 16 or 8 a thread. Backward there are six times as many alive: compiled for sm_90, 58 registers (116 for a
layer norm with 16), so that 1024 threads fit a multiprocessor."""
_COLUMNS: Final = 512
"""Numbers of a program that sums columns of wide rows."""
_THREADS: Final = 1024
"""Of the programs that sum over rows, on each multiprocessor: as many as fit, few enough parts to add up."""


class RowLayout(NamedTuple):
    """How rows of this width are run."""

    is_whole: bool
    block: int
    num_warps: int

    @classmethod
    def of(cls, width: int, per_warp: int) -> RowLayout:
        block = 1 << (width - 1).bit_length()
        is_whole = block <= _WIDEST
        block = block if is_whole else _WIDE_BLOCK
        return cls(is_whole, block, max(1, min(32, block // per_warp)))


def _forward_shapes(
    x_RD: Tensor, weight_D: Side, bias_D: Side, residual_RD: Side, eps: float, is_centred: bool
) -> list[Tensor]:
    like = torch.empty_like(x_RD, memory_format=torch.contiguous_format)
    num_rows = x_RD.shape[0]
    return [
        like,
        torch.empty_like(like) if residual_RD is not None else x_RD.new_empty(0),
        x_RD.new_empty(num_rows if is_centred else 0, dtype=torch.float32),
        x_RD.new_empty(num_rows, dtype=torch.float32),
    ]


@opaque(
    "norm_forward(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, bool is_centred) -> Tensor[]",
    _forward_shapes,
)
def _forward(
    x_RD: Tensor, weight_D: Side, bias_D: Side, residual_RD: Side, eps: float, is_centred: bool
) -> list[Tensor]:
    """What is normed, the sum (empty without a residual), the means (empty unless centred), the reciprocal roots."""
    outputs = _forward_shapes(x_RD, weight_D, bias_D, residual_RD, eps, is_centred)
    if x_RD.numel() == 0:
        return outputs
    num_rows, width = x_RD.shape
    layout = RowLayout.of(width, _FORWARD_PER_WARP)
    source: Any = import_module(_SOURCE)
    source.norm_forward[(num_rows,)](
        x_RD,
        *(side if side is not None else x_RD for side in (residual_RD, weight_D, bias_D)),
        *outputs,
        x_RD.stride(0),
        residual_RD.stride(0) if residual_RD is not None else 0,
        width,
        eps,
        IS_CENTRED=is_centred,
        HAS_RESIDUAL=residual_RD is not None,
        HAS_WEIGHT=weight_D is not None,
        HAS_BIAS=bias_D is not None,
        IS_WHOLE=layout.is_whole,
        BLOCK=layout.block,
        num_warps=layout.num_warps,
    )
    return outputs


def _backward_shapes(
    grad_RD: Tensor, passed_RD: Side, summed_RD: Tensor, weight_D: Side, bias_D: Side, *saved: object
) -> list[Tensor]:
    like = torch.empty_like(summed_RD, memory_format=torch.contiguous_format)
    return [like, *(torch.empty_like(v) if v is not None else grad_RD.new_empty(0) for v in (weight_D, bias_D))]


@opaque(
    "norm_backward(Tensor grad, Tensor? passed, Tensor summed, Tensor? weight, Tensor? bias, Tensor means, Tensor factors, "
    "bool is_centred) -> Tensor[]",
    _backward_shapes,
)
def _backward(
    grad_RD: Tensor,
    passed_RD: Side,
    summed_RD: Tensor,
    weight_D: Side,
    bias_D: Side,
    means_R: Tensor,
    factors_R: Tensor,
    is_centred: bool,
) -> list[Tensor]:
    """The gradients of the sum, the weight and the bias; `passed` is the gradient that comes by way of the sum itself.

    Sums over rows are made in parts of a fixed order and added up: the same bits every time.
    """
    grad_in_RD = torch.empty_like(summed_RD, memory_format=torch.contiguous_format)
    num_rows, width = summed_RD.shape
    layout = RowLayout.of(max(1, width), _BACKWARD_PER_WARP)
    num_parts = _num_parts(grad_RD.device, layout, num_rows)
    needs_sums = weight_D is not None or bias_D is not None
    parts_WPD = torch.empty(2, num_parts if needs_sums else 0, width, dtype=torch.float32, device=grad_RD.device)
    tensors = (grad_RD, passed_RD if passed_RD is not None else grad_RD, summed_RD)
    inputs = (*tensors, weight_D if weight_D is not None else grad_RD, means_R, factors_R, grad_in_RD)
    strides = [t.stride(0) for t in tensors]
    sums = {"IS_CENTRED": is_centred, "HAS_WEIGHT": weight_D is not None, "HAS_BIAS": bias_D is not None}
    sizes = {"HAS_PASSED": passed_RD is not None, "BLOCK": layout.block, "num_warps": layout.num_warps}
    source: Any = import_module(_SOURCE)
    if summed_RD.numel() == 0:
        parts_WPD.zero_()
    elif layout.is_whole:
        source.backward_whole[(num_parts,)](*inputs, *parts_WPD, *strides, num_rows, width, **sums, **sizes)
    else:
        has_bias = sums.pop("HAS_BIAS")
        source.backward_wide[(num_rows,)](*inputs, *strides, width, **sums, **sizes)
        if needs_sums:
            grid = math.ceil(width / _COLUMNS), num_parts
            of_rows = (grad_RD, summed_RD, means_R, factors_R, *parts_WPD, strides[0], strides[2], num_rows, width)
            source.column_sums[grid](*of_rows, **sums, HAS_BIAS=has_bias, BLOCK=_COLUMNS, num_warps=4)
    of_vectors = [
        part_PD.sum(dim=0).to(vector.dtype) if vector is not None else grad_RD.new_empty(0)
        for part_PD, vector in zip(parts_WPD, (weight_D, bias_D), strict=True)
    ]
    return [grad_in_RD, *of_vectors]


def _num_parts(device: torch.device, layout: RowLayout, num_rows: int) -> int:
    if device.type != "cuda":
        return min(3, max(1, num_rows))  # under Triton's interpreter: some, so that there is something to add up
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    each = max(1, _THREADS // (32 * layout.num_warps)) if layout.is_whole else 1
    return max(1, min(num_rows, processors * each))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_RD: Tensor, weight_D: Side, bias_D: Side, residual_RD: Side, eps: float, is_centred: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.is_centred, ctx.has_residual = is_centred, residual_RD is not None
        normed_RD, summed_RD, means_R, factors_R = _forward(x_RD, weight_D, bias_D, residual_RD, eps, is_centred)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(summed_RD)
        saved_RD = summed_RD if residual_RD is not None else x_RD
        ctx.save_for_backward(saved_RD, weight_D, bias_D, means_R, factors_R)
        return normed_RD, summed_RD if residual_RD is not None else None

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return passed, None, None, passed if ctx.has_residual else None, None, None
        passed = with_dense_rows(passed) if passed is not None else None
        grad_in_RD, *gradients = _backward(with_dense_rows(grad), passed, *ctx.saved_tensors, ctx.is_centred)
        of_vectors = (g if v is not None else None for g, v in zip(gradients, ctx.saved_tensors[1:3], strict=True))
        return (grad_in_RD, *of_vectors, grad_in_RD if ctx.has_residual else None, None, None)


def normed(
    x: Tensor, weight_D: Side = None, bias_D: Side = None, residual: Side = None, *, eps: float = 1e-5, is_centred: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Either norm: the reference's result, whose gradient cannot be differentiated again.

    Rows may lie at any distance, their numbers must be neighbours: what is not so is copied first.
    """
    width = x.shape[-1]
    normed_RD, summed_RD = _Norm.apply(  # type: ignore[no-untyped-call]
        with_dense_rows(x.reshape(-1, width)),
        *(v.contiguous() if v is not None else None for v in (weight_D, bias_D)),
        with_dense_rows(residual.reshape(-1, width)) if residual is not None else None,
        eps,
        is_centred,
    )
    result: Tensor = normed_RD.view(x.shape)
    return result if residual is None else (result, summed_RD.view(x.shape))
