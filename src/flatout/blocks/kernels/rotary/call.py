"""`flatout.rotary`: the public function, which checks its arguments and selects a kernel."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.selection import kernel_operator
from flatout.core.errors import UsageError

_LAYOUTS: Final = ("half", "interleaved")
_rotary = kernel_operator(
    "rotary", "(Tensor x, Tensor cos, Tensor sin, Tensor? positions, *, str layout, str? kernel) -> Tensor"
)


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    layout: str = "half",
    kernel: str | None = None,
) -> Tensor:
    """Rotary position embedding of `x`, (B, T, N, H): pairs of a head are turned by the angles of their token's position.

    `cos` and `sin` are tables (L, H / 2) of at least T positions; `positions` says which row each token takes, (T,) or (B, T)
    integers, by default 0..T-1. One outside of the tables is an error on a CPU and makes NaN on a GPU. In layout "half" pair r is
    (x[r], x[r + H / 2]), as in Llama and GPT-NeoX; in "interleaved" (x[2 r], x[2 r + 1]), as in RoFormer and GPT-J. The result is
    contiguous and has the dtype of x; what is between is float32 (float64 for float64). The tables get no gradient, and that of x
    cannot be differentiated again. To turn a part of each head, give that part.

    `kernel` is the id of the implementation, by default the first that can run: `rotary.triton`, `.in_place`, `.reference`.
    Raises UsageError for shapes and layouts that do not fit, and for a kernel that cannot run them.

    >>> quarter = torch.tensor([[0.0], [1.0]])  # angles of 0 and a quarter turn
    >>> rotary(torch.ones(1, 2, 1, 2), 1 - quarter, quarter)[0, :, 0]
    tensor([[ 1.,  1.],
            [-1.,  1.]])
    """
    _check(x, cos, sin, positions, layout)
    result: Tensor = _rotary(x, cos, sin, positions, layout=layout, kernel=kernel)
    return result


def _check(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, layout: str) -> None:
    if layout not in _LAYOUTS:
        raise UsageError(f"layout '{layout}' is none of {', '.join(_LAYOUTS)}")
    if x.dim() != 4 or x.shape[-1] % 2 or not x.is_floating_point():
        raise UsageError(f"x is {x.dtype} of shape {tuple(x.shape)}; give floating-point (B, T, N, H) with an even H")
    if cos.shape != sin.shape or cos.dim() != 2 or 2 * cos.shape[1] != x.shape[-1]:
        raise UsageError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} are not tables (positions, H / 2) for H = {x.shape[-1]}"
        )
    if cos.requires_grad or sin.requires_grad:
        raise UsageError("cos or sin requires a gradient, and tables get none; detach them")
    if positions is None and cos.shape[0] < x.shape[1]:
        raise UsageError(
            f"x has {x.shape[1]} tokens, the tables {cos.shape[0]} positions; make them longer, or give positions"
        )
    if positions is not None and tuple(positions.shape) not in ((x.shape[1],), (x.shape[0], x.shape[1])):
        raise UsageError(
            f"positions {tuple(positions.shape)} are not one for each token of x {tuple(x.shape)}; give (T,) or (B, T)"
        )
    if positions is not None and (positions.is_floating_point() or positions.dtype == torch.bool):
        raise UsageError(f"positions are {positions.dtype}; give integers")
