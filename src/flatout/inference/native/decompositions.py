"""Operators taken apart into those that have native code, where torch's own way would leave others."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

aten = torch.ops.aten
_KEPT: Final = ("_safe_softmax",)
"""Operators that torch would take apart, and that have code here."""


def table() -> Any:
    """Of torch, and of this module."""
    found = torch.export.default_decompositions()
    for target in list(found):
        packet = getattr(target, "overloadpacket", None)
        if packet is not None and packet.__name__ in _KEPT:
            del found[target]
    return {**found, **_OWN}


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm of each group, then each channel's scale and shift."""
    width = c // groups * inner
    rows = aten.view.default(x.contiguous(), [n * groups, width])
    normed, mean, rstd = aten.native_layer_norm.default(rows, [width], None, None, eps)
    y = aten.view.default(normed, list(x.shape))
    sides = [1, c, *[1] * (x.dim() - 2)]
    if weight is not None:
        y = aten.mul.Tensor(y, aten.view.default(weight, sides))
    if bias is not None:
        y = aten.add.Tensor(y, aten.view.default(bias, sides))
    return y, aten.view.default(mean, [n, groups]), aten.view.default(rstd, [n, groups])


def _flip(x: Tensor, dims: list[int]) -> Tensor:
    for dim in dims:
        back = torch.arange(x.shape[dim] - 1, -1, -1, device=x.device)
        x = aten.index_select.default(x, dim, back)
    return x


def _any(x: Tensor) -> Tensor:
    made: Tensor = aten.any.dim(aten.view.default(x.contiguous(), [-1]), 0)
    return made


def _all(x: Tensor) -> Tensor:
    made: Tensor = aten.all.dim(aten.view.default(x.contiguous(), [-1]), 0)
    return made


def _prod(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    made: Tensor = aten.prod.dim_int(aten.view.default(x.contiguous(), [-1]), 0, dtype=dtype)
    return made


def _max(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return aten.amax.default(x, [dim], keepdim), aten.argmax.default(x, dim, keepdim)


def _min(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return aten.amin.default(x, [dim], keepdim), aten.argmin.default(x, dim, keepdim)


def _repeat(x: Tensor, repeats: list[int]) -> Tensor:
    sizes = [1] * (len(repeats) - x.dim()) + list(x.shape)
    apart = [n for size in sizes for n in (1, size)]
    wide = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
    y = aten.clone.default(aten.expand.default(aten.view.default(x.contiguous(), apart), wide))
    made: Tensor = aten.view.default(y, [a * b for a, b in zip(repeats, sizes, strict=True)])
    return made


_OWN: Final[dict[Any, Any]] = {
    aten.native_group_norm.default: _group_norm,
    aten.flip.default: _flip,
    aten.repeat.default: _repeat,
    aten.any.default: _any,
    aten.all.default: _all,
    aten.prod.default: _prod,
    aten.max.dim: _max,
    aten.min.dim: _min,
}
