"""Rotary position embedding: what the other kernels must return.

B batch, T tokens, N heads, H head dim, R pairs of a head (H / 2), L positions that the tables have
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.records.kernel import Kernel


def rotary(
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
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    else:
        a, b = x[..., ::2], x[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return turned.to(x_BTNH.dtype)


def angles(x_BTNH: Tensor, table_LR: Tensor, positions: Tensor | None) -> Tensor:
    """The table's rows of these tokens, (T, 1, R) or (B, T, 1, R)."""
    rows = table_LR[: x_BTNH.shape[1]] if positions is None else table_LR[positions]
    return rows.unsqueeze(-2)


def refusal(*arguments: object, **options: object) -> None:
    """It takes everything."""


KERNEL = Kernel(
    id="rotary.reference",
    op="rotary",
    title="Operator by operator",
    module=__name__,
    run=rotary,
    refusal=refusal,
    order=1000,
    guarantee="exact",
)
