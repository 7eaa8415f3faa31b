"""PyTorch's operators, the gate's sigmoid made again in the backward pass.

The time is plain PyTorch's (forward and backward on an EPYC core, 2048 x 1024 float32: 0.9 to 1.0 of it); two arrays are kept
for the backward pass, not three.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.opaque import opaque
from flatout.blocks.kernels.swiglu.reference import GatingPasses, backward_shapes, forward_shapes, gated, wide_halves
from flatout.core.parts import kernel


@opaque("swiglu_recomputed(Tensor gate, Tensor? up) -> Tensor", forward_shapes)
def _forward(gate: Tensor, up: Tensor | None) -> Tensor:
    dtype, (gate, up) = gate.dtype, wide_halves(gate, up)
    return F.silu(gate, inplace=False).mul_(up).to(dtype).contiguous()


@opaque("swiglu_recomputed_backward(Tensor grad, Tensor gate, Tensor? up) -> Tensor[]", backward_shapes)
def _backward(grad: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    result = backward_shapes(grad, gate, up)
    into_gate, into_up = result[0].chunk(2, dim=-1) if up is None else result
    wide_gate, wide_up = wide_halves(gate, up)
    wide_grad = grad.to(wide_gate.dtype)
    into_gate.copy_(torch.ops.aten.silu_backward(wide_grad * wide_up, wide_gate))
    into_up.copy_(F.silu(wide_gate).mul_(wide_grad))
    return result


KERNEL = kernel(
    __name__,
    "PyTorch's operators, the sigmoid made again in the backward pass",
    partial(gated, GatingPasses(_forward, _backward)),
    order=500,
    name="recomputed",
)
