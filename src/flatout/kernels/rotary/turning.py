"""The gradient of a rotation is the rotation back: what all implementations share.

B batch, T tokens, N heads, H head dim, R pairs of a head, L positions that the tables have
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.once import once

TURN_ARGUMENTS: Final = "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, str layout, bool is_back) -> Tensor"
"""What an implementation takes: `is_back` turns by the negative angles."""

Turn = Callable[[Tensor, Tensor, Tensor, Tensor | None, str, bool], Tensor]


def shapes(x_BTNH: Tensor, *others: Any) -> Tensor:
    """What a turn returns, without numbers."""
    return torch.empty_like(x_BTNH, memory_format=torch.contiguous_format)


def turned(
    turn: Turn, x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None = None, *, layout: str = "half"
) -> Tensor:
    """The reference's result. Its gradient cannot be differentiated again."""
    result: Tensor = _Turned.apply(x_BTNH, cos_LR, sin_LR, positions, layout, turn)  # type: ignore[no-untyped-call]
    return result


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None, layout: str, turn: Turn
    ) -> Tensor:
        ctx.layout, ctx.turn = layout, turn
        ctx.save_for_backward(cos_LR, sin_LR, positions)
        return turn(x_BTNH, cos_LR, sin_LR, positions, layout, False)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.turn(grad, *ctx.saved_tensors, ctx.layout, True), None, None, None, None, None
