"""SwiGLU: what the other kernels must return, and what they share: they save their inputs and nothing else.

The backward pass makes the gate's sigmoid again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import once
from flatout.core.parts import kernel


def reference_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`gate * sigmoid(gate) * up`, in float32 (float64 for float64), rounded once; without `up`, of the halves of `gate`."""
    dtype, (gate, up) = gate.dtype, wide_halves(gate, up)
    return (gate * torch.sigmoid(gate) * up).to(dtype)


def wide_halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up, of the one tensor or the two, in float32, or float64 for float64."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    return gate.to(wide), up.to(wide)


class GatingPasses(NamedTuple):
    """One implementation: `forward(gate, up)` and `backward(grad, gate, up)`, which returns the two gradients or, packed, one."""

    forward: Callable[[Tensor, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor | None], list[Tensor]]


def forward_shapes(gate: Tensor, up: Tensor | None) -> Tensor:
    """An empty tensor of the result's shape."""
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2) if up is None else gate.shape)


def backward_shapes(grad: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    """Empty tensors of the shapes of the gradients."""
    return [t.new_empty(t.shape) for t in (gate, up) if t is not None]


def gated(passes: GatingPasses, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The reference's result. Its gradient cannot be differentiated again."""
    result: Tensor = _Gated.apply(gate, up, passes)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, passes: GatingPasses) -> Tensor:
        ctx.passes = passes
        ctx.save_for_backward(gate, up)
        return passes.forward(gate, up)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        result = ctx.passes.backward(grad, gate, up)
        return result[0], result[1] if up is not None else None, None


KERNEL = kernel(__name__, "Operator by operator", reference_swiglu, order=1000, guarantee="exact")
