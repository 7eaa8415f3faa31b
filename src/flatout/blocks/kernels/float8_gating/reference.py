"""Products in float8 written as products in float32 of rounded numbers; what the other kernel must return, and what both share.

Each factor is rounded with one scale, its largest magnitude at the format's largest number; gradients of results to e5m2, all
else to e4m3. The rule is that of torchao 0.18's tensorwise recipe (float8_linear.py), so that a model may have its layers from
there. A product of the units takes both factors along the inner dimension; so each matrix is held as it lies, exchanged, or both.

N rows, I inputs and outputs of the MLP, H hidden width
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.float8_formats import GRADIENT, Rounded, float8_of, step_of
from flatout.blocks.kernels.opaque import once, opaque
from flatout.core.parts import kernel


class Float8GatingPasses(NamedTuple):
    """The functions that an implementation consists of.

    `product(a, b, dtype)` of matrices (R, K) and (C, K) is `a @ b.T`. `rounded(grad, scale)` returns a gradient over its scale in
    e5m2, as it lies and exchanged. `forward(gate, up)` returns SwiGLU in e4m3 and its scale.
    `backward(grad, gate, up, scale)` returns the gradients of gate and up in e5m2, each as it lies and exchanged, SwiGLU
    exchanged, with that scale, and the scales of the two gradients, each a tensor of its own: cuBLAS 13.0 multiplies by no scale
    whose address is no multiple of 16 bytes (CUBLAS_STATUS_NOT_SUPPORTED).
    """

    product: Callable[[Rounded, Rounded, torch.dtype], Tensor]
    rounded: Callable[[Tensor, Tensor], list[Tensor]]
    forward: Callable[[Tensor, Tensor], list[Tensor]]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], list[Tensor]]


def twice_rounded_shapes(grad: Tensor, scale: Tensor) -> list[Tensor]:
    """Empty tensors of the shapes of what `rounded` returns."""
    return [grad.new_empty(shape, dtype=GRADIENT) for shape in (grad.shape, grad.shape[::-1])]


def rounded_shapes(gate: Tensor, up: Tensor) -> list[Tensor]:
    """Empty tensors of the shapes of what `forward` returns."""
    return [torch.empty_like(gate, dtype=torch.float8_e4m3fn), gate.new_empty((), dtype=torch.float32)]


def gradient_shapes(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> list[Tensor]:
    """Empty tensors of the shapes of what `backward` returns."""
    N, H = gate.shape
    by_rows, exchanged = ((N, H), (H, N))
    of_gradients = [gate.new_empty(shape, dtype=GRADIENT) for shape in (by_rows, exchanged) * 2]
    gated = gate.new_empty(exchanged, dtype=torch.float8_e4m3fn)
    return [*of_gradients, gated, *(gate.new_empty((), dtype=torch.float32) for _ in range(2))]


def gated_mlp(passes: Float8GatingPasses, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The result, of the shape and dtype of x. Its gradient cannot be differentiated again."""
    result: Tensor = _GatedMlp.apply(x.reshape(-1, x.shape[-1]), gate, up, down, passes)  # type: ignore[no-untyped-call]
    return result.view(x.shape)


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, gate_HI: Tensor, up_HI: Tensor, down_IH: Tensor, passes: Float8GatingPasses
    ) -> Tensor:
        x8, dtype = float8_of(x_NI), x_NI.dtype
        gate_NH = passes.product(x8, float8_of(gate_HI), dtype)
        up_NH = passes.product(x8, float8_of(up_HI), dtype)
        gated8 = Rounded(*passes.forward(gate_NH, up_NH))
        ctx.passes = passes
        ctx.save_for_backward(x_NI, gate_HI, up_HI, down_IH, gate_NH, up_NH, gated8.scale)
        return passes.product(gated8, float8_of(down_IH), dtype)

    @staticmethod
    @once
    def backward(ctx: Any, grad_NI: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, gate_HI, up_HI, down_IH, gate_NH, up_NH, gated_scale = ctx.saved_tensors
        passes, dtype = ctx.passes, x_NI.dtype
        needs_x, needs_gate, needs_up, needs_down, _ = ctx.needs_input_grad
        grad_scale, product = step_of(grad_NI, GRADIENT), passes.product
        grad8, grad8_IN = (Rounded(t, grad_scale) for t in passes.rounded(grad_NI, grad_scale))
        to_gated_NH = product(grad8, _exchanged(float8_of(down_IH)), dtype)
        *small, gated8_HN, gate_scale, up_scale = passes.backward(to_gated_NH, gate_NH, up_NH, gated_scale)
        to_gate8, to_gate8_HN = (Rounded(t, gate_scale) for t in small[:2])
        to_up8, to_up8_HN = (Rounded(t, up_scale) for t in small[2:])
        of_x = of_gate = of_up = of_down = None
        if needs_x:
            of_x = product(to_gate8, _exchanged(float8_of(gate_HI)), dtype)
            of_x = of_x + product(to_up8, _exchanged(float8_of(up_HI)), dtype)
        if needs_gate or needs_up:
            x8_IN = _exchanged(float8_of(x_NI))
            of_gate = product(to_gate8_HN, x8_IN, dtype).to(gate_HI.dtype) if needs_gate else None
            of_up = product(to_up8_HN, x8_IN, dtype).to(up_HI.dtype) if needs_up else None
        if needs_down:
            gated8 = Rounded(gated8_HN, gated_scale)
            of_down = product(grad8_IN, gated8, dtype).to(down_IH.dtype)
        return of_x, of_gate, of_up, of_down, None


def _exchanged(matrix: Rounded) -> Rounded:
    return Rounded(matrix.values.t().contiguous(), matrix.scale)


def _product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    with torch.autocast(a.values.device.type, enabled=False):
        return ((a.values.float() @ b.values.float().t()) * (a.scale * b.scale)).to(dtype)


@opaque("float8_gating_reference_rounded(Tensor grad, Tensor scale) -> Tensor[]", twice_rounded_shapes)
def _rounded(grad: Tensor, scale: Tensor) -> list[Tensor]:
    small = (grad.float() * scale.reciprocal()).to(GRADIENT)
    return [small, small.t().contiguous()]


@opaque("float8_gating_reference(Tensor gate, Tensor up) -> Tensor[]", rounded_shapes)
def _forward(gate: Tensor, up: Tensor) -> list[Tensor]:
    return list(float8_of(F.silu(gate.float()) * up.float()))


@opaque(
    "float8_gating_reference_backward(Tensor grad, Tensor gate, Tensor up, Tensor scale) -> Tensor[]", gradient_shapes
)
def _backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> list[Tensor]:
    grad, gate, up = grad.float(), gate.float(), up.float()
    to_gate = float8_of(torch.ops.aten.silu_backward(grad * up, gate), GRADIENT)
    to_up = float8_of(grad * F.silu(gate), GRADIENT)
    gated = (F.silu(gate) * up * scale.reciprocal()).to(torch.float8_e4m3fn)
    twice = (to_gate.values, _exchanged(to_gate).values, to_up.values, _exchanged(to_up).values)
    return [*twice, gated.t().contiguous(), to_gate.scale, to_up.scale]


KERNEL = kernel(
    __name__,
    "Products in float32 of numbers that were rounded to float8",
    partial(gated_mlp, Float8GatingPasses(_product, _rounded, _forward, _backward)),
    order=1000,
    guarantee="quality",
)
