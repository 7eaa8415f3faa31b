"""Both norms by Triton: the operators, their gradient, and how many programs run.

R rows, D width, P parts of a sum over rows
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.kernels.once import once
from flatout.kernels.opaque import opaque

_SOURCE: Final = "flatout.kernels.norm.on_device.rows"
_WIDEST: Final = 16384
"""Numbers that a program holds at once; wider rows are read in blocks, more than once."""
_WIDE_BLOCK: Final = 4096
_FORWARD_PER_WARP, _BACKWARD_PER_WARP = 512, 256
"""Numbers of a warp, 16 or 8 a thread. Backward there are six times as many alive: compiled for sm_90, 58 registers (116 for a
layer norm with 16), so that 1024 threads fit a multiprocessor."""
_THREADS: Final = 1024
"""Of the programs that sum over rows, on each multiprocessor: as many as fit, few enough parts to add up."""


class Layout(NamedTuple):
    """How rows of this width are run."""

    is_whole: bool
    block: int
    num_warps: int

    @classmethod
    def of(cls, width: int, per_warp: int) -> Layout:
        block = 1 << (width - 1).bit_length()
        is_whole = block <= _WIDEST
        block = block if is_whole else _WIDE_BLOCK
        return cls(is_whole, block, max(1, min(32, block // per_warp)))


def _forward_shapes(
    x_RD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    residual_RD: Tensor | None,
    eps: float,
    is_centred: bool,
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
    x_RD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    residual_RD: Tensor | None,
    eps: float,
    is_centred: bool,
) -> list[Tensor]:
    """What is normed, the sum (empty without a residual), the means (empty unless centred), the reciprocal roots."""
    made = _forward_shapes(x_RD, weight_D, bias_D, residual_RD, eps, is_centred)
    normed_RD, summed_RD, means_R, factors_R = made
    num_rows, width = x_RD.shape
    if x_RD.numel() == 0:
        return made
    layout = Layout.of(width, _FORWARD_PER_WARP)
    source: Any = import_module(_SOURCE)
    source.forward[(num_rows,)](
        x_RD,
        residual_RD if residual_RD is not None else x_RD,
        weight_D if weight_D is not None else x_RD,
        bias_D if bias_D is not None else x_RD,
        normed_RD,
        summed_RD,
        means_R,
        factors_R,
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
    return made


def _backward_shapes(
    grad_RD: Tensor,
    passed_RD: Tensor | None,
    summed_RD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    means_R: Tensor,
    factors_R: Tensor,
    is_centred: bool,
) -> list[Tensor]:
    return [
        torch.empty_like(summed_RD, memory_format=torch.contiguous_format),
        torch.empty_like(weight_D) if weight_D is not None else grad_RD.new_empty(0),
        torch.empty_like(bias_D) if bias_D is not None else grad_RD.new_empty(0),
    ]


@opaque(
    "norm_backward(Tensor grad, Tensor? passed, Tensor summed, Tensor? weight, Tensor? bias, Tensor means, Tensor factors, "
    "bool is_centred) -> Tensor[]",
    _backward_shapes,
)
def _backward(
    grad_RD: Tensor,
    passed_RD: Tensor | None,
    summed_RD: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    means_R: Tensor,
    factors_R: Tensor,
    is_centred: bool,
) -> list[Tensor]:
    """The gradients of the sum, the weight and the bias; `passed` is the gradient that comes by way of the sum itself.

    Sums over rows are made in parts of a fixed order and added up: the same bits every time.
    """
    made_RD = torch.empty_like(summed_RD, memory_format=torch.contiguous_format)
    num_rows, width = summed_RD.shape
    layout = Layout.of(max(1, width), _BACKWARD_PER_WARP)
    num_parts = _num_parts(grad_RD.device, layout, num_rows)
    needs_sums = weight_D is not None or bias_D is not None
    parts_WPD = torch.empty(2, num_parts if needs_sums else 0, width, dtype=torch.float32, device=grad_RD.device)
    if summed_RD.numel() == 0:
        parts_WPD.zero_()
    else:
        tensors = (grad_RD, passed_RD if passed_RD is not None else grad_RD, summed_RD)
        weight = weight_D if weight_D is not None else grad_RD
        run = _backward_whole if layout.is_whole else _backward_wide
        run(layout, tensors, weight, (means_R, factors_R), made_RD, parts_WPD, (num_parts, num_rows, width), {
            "IS_CENTRED": is_centred,
            "HAS_PASSED": passed_RD is not None,
            "HAS_WEIGHT": weight_D is not None,
            "HAS_BIAS": bias_D is not None,
        })  # fmt: skip
    none = grad_RD.new_empty(0)
    return [
        made_RD,
        parts_WPD[0].sum(dim=0).to(weight_D.dtype) if weight_D is not None else none,
        parts_WPD[1].sum(dim=0).to(bias_D.dtype) if bias_D is not None else none.clone(),
    ]


def _backward_whole(
    layout: Layout,
    tensors: tuple[Tensor, Tensor, Tensor],
    weight_D: Tensor,
    kept: tuple[Tensor, Tensor],
    made_RD: Tensor,
    parts_WPD: Tensor,
    sizes: tuple[int, int, int],
    has: dict[str, bool],
) -> None:
    num_parts, num_rows, width = sizes
    source: Any = import_module(_SOURCE)
    source.backward_whole[(num_parts,)](
        *tensors,
        weight_D,
        *kept,
        made_RD,
        parts_WPD[0],
        parts_WPD[1],
        *(t.stride(0) for t in tensors),
        num_rows,
        width,
        **has,
        BLOCK=layout.block,
        num_warps=layout.num_warps,
    )


def _backward_wide(
    layout: Layout,
    tensors: tuple[Tensor, Tensor, Tensor],
    weight_D: Tensor,
    kept: tuple[Tensor, Tensor],
    made_RD: Tensor,
    parts_WPD: Tensor,
    sizes: tuple[int, int, int],
    has: dict[str, bool],
) -> None:
    num_parts, num_rows, width = sizes
    grad_RD, _, summed_RD = tensors
    sums = {name: has[name] for name in ("IS_CENTRED", "HAS_WEIGHT", "HAS_BIAS")}
    source: Any = import_module(_SOURCE)
    source.backward_wide[(num_rows,)](
        *tensors,
        weight_D,
        *kept,
        made_RD,
        *(t.stride(0) for t in tensors),
        width,
        **{name: is_so for name, is_so in has.items() if name != "HAS_BIAS"},
        BLOCK=layout.block,
        num_warps=layout.num_warps,
    )
    if not (has["HAS_WEIGHT"] or has["HAS_BIAS"]):
        return
    block = 512
    source.column_sums[(math.ceil(width / block), num_parts)](
        grad_RD,
        summed_RD,
        *kept,
        parts_WPD[0],
        parts_WPD[1],
        grad_RD.stride(0),
        summed_RD.stride(0),
        num_rows,
        width,
        **sums,
        BLOCK=block,
        num_warps=4,
    )


def _num_parts(device: torch.device, layout: Layout, num_rows: int) -> int:
    if device.type != "cuda":
        return min(3, max(1, num_rows))  # under Triton's interpreter: some, so that there is something to add up
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    each = max(1, _THREADS // (32 * layout.num_warps)) if layout.is_whole else 1
    return max(1, min(num_rows, processors * each))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        residual_RD: Tensor | None,
        eps: float,
        is_centred: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.is_centred, ctx.has_residual = is_centred, residual_RD is not None
        normed_RD, summed_RD, means_R, factors_R = _forward(x_RD, weight_D, bias_D, residual_RD, eps, is_centred)
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[3]):
            ctx.mark_non_differentiable(summed_RD)
        kept_RD = summed_RD if residual_RD is not None else x_RD
        ctx.save_for_backward(kept_RD, weight_D, bias_D, means_R, factors_R)
        return normed_RD, summed_RD if residual_RD is not None else None

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor | None, passed: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return passed, None, None, passed if ctx.has_residual else None, None, None
        summed_RD, weight_D, bias_D, means_R, factors_R = ctx.saved_tensors
        made_RD, weight, bias = _backward(
            _with_rows(grad),
            _with_rows(passed) if passed is not None else None,
            summed_RD,
            weight_D,
            bias_D,
            means_R,
            factors_R,
            ctx.is_centred,
        )
        return (
            made_RD,
            weight if weight_D is not None else None,
            bias if bias_D is not None else None,
            made_RD if ctx.has_residual else None,
            None,
            None,
        )


def normed(
    x: Tensor,
    weight_D: Tensor | None,
    bias_D: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    is_centred: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Either norm. Rows may lie at any distance, their numbers must be neighbours: what is not so is copied first."""
    width = x.shape[-1]
    normed_RD, summed_RD = _Norm.apply(  # type: ignore[no-untyped-call]
        _with_rows(x.reshape(-1, width)),
        weight_D.contiguous() if weight_D is not None else None,
        bias_D.contiguous() if bias_D is not None else None,
        _with_rows(residual.reshape(-1, width)) if residual is not None else None,
        eps,
        is_centred,
    )
    if residual is None:
        result: Tensor = normed_RD.view(x.shape)
        return result
    return normed_RD.view(x.shape), summed_RD.view(x.shape)


def _with_rows(t_RD: Tensor) -> Tensor:
    return t_RD if t_RD.stride(-1) == 1 else t_RD.contiguous()
