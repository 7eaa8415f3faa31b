"""SwiGLU keeps its inputs and nothing else: the backward pass makes the gate's sigmoid again.

R rows, D width; a packed input has rows of 2 D, the gate first
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.kernels.once import once


class Way(NamedTuple):
    """One implementation: `forward(gate, up)` and `backward(grad, gate, up)`, which returns the two gradients or, packed, one."""

    forward: Callable[[Tensor, Tensor | None], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor | None], list[Tensor]]


def forward_shapes(gate: Tensor, up: Tensor | None) -> Tensor:
    """The result, without numbers."""
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2) if up is None else gate.shape)


def backward_shapes(grad: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    """The gradients, without numbers."""
    return [t.new_empty(t.shape) for t in (gate, up) if t is not None]


def gated(way: Way, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """The reference's result. Its gradient cannot be differentiated again."""
    result: Tensor = _Gated.apply(gate, up, way)  # type: ignore[no-untyped-call]
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, way: Way) -> Tensor:
        ctx.way = way
        ctx.save_for_backward(gate, up)
        return way.forward(gate, up)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        made = ctx.way.backward(grad, gate, up)
        return made[0], made[1] if up is not None else None, None
