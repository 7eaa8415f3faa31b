"""Rotary position embedding: what the other kernels must return, and the gradient that they share: the rotation back.

B batch, T tokens, N heads, H head dim, R pairs of a head (H / 2), L positions that the tables have
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import Side, once
from flatout.core.parts import kernel

ROTATION_ARGUMENTS: Final = "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, str layout, bool is_back) -> Tensor"
"""What an implementation takes: `is_back` turns by the negative angles."""

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor | None, str, bool], Tensor]


def reference_rotary(
    x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None = None, *, layout: str = "half"
) -> Tensor:
    """Pair r of a head becomes `(a cos - b sin, b cos + a sin)`, in float32 (float64 for float64), rounded once.

    In layout "half" the pair is (x[r], x[R + r]), in "interleaved" (x[2 r], x[2 r + 1]). Angles are those of `positions`, (T,) or
    (B, T), or else of 0..T-1.
    """
    wide = torch.promote_types(x_BTNH.dtype, torch.float32)
    cos, sin = angles(x_BTNH, cos_LR, positions).to(wide), angles(x_BTNH, sin_LR, positions).to(wide)
    x = x_BTNH.to(wide)
    if layout == "half":
        a, b = x.chunk(2, dim=-1)
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = x[..., ::2], x[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return rotated.to(x_BTNH.dtype)


def angles(x_BTNH: Tensor, table_LR: Tensor, positions: Tensor | None) -> Tensor:
    """The table's rows of these tokens, (T, 1, R) or (B, T, 1, R)."""
    rows = table_LR[: x_BTNH.shape[1]] if positions is None else table_LR[positions]
    return rows.unsqueeze(-2)


def rotation_shapes(x_BTNH: Tensor, *others: Any) -> Tensor:
    """What a turn returns, without numbers."""
    return torch.empty_like(x_BTNH, memory_format=torch.contiguous_format)


def rotate_with_gradient(
    rotate: Rotate, x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Side = None, *, layout: str = "half"
) -> Tensor:
    """The reference's result. Its gradient cannot be differentiated again."""
    result: Tensor = _Rotation.apply(x_BTNH, cos_LR, sin_LR, positions, layout, rotate)  # type: ignore[no-untyped-call]
    return result


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTNH: Tensor, cos_LR: Tensor, sin_LR: Tensor, positions: Tensor | None, layout: str, rotate: Rotate
    ) -> Tensor:
        ctx.layout, ctx.rotate = layout, rotate
        ctx.save_for_backward(cos_LR, sin_LR, positions)
        return rotate(x_BTNH, cos_LR, sin_LR, positions, layout, False)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.rotate(grad, *ctx.saved_tensors, ctx.layout, True), None, None, None, None, None


KERNEL = kernel(__name__, "Operator by operator", reference_rotary, order=1000, guarantee="exact")
