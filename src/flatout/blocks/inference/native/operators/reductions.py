"""Reductions over any dimensions: they are moved to the end, and rows are reduced."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

from torch import Tensor

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import (
    Box,
    aten,
    aten_name,
    native_dtype_name,
    note_of,
    shape_of,
)
from flatout.blocks.inference.native.operator_table import NativeOperator
from flatout.blocks.inference.native.statements import RowKind, RowWise
from flatout.blocks.inference.native.values import Lazy, Value, boxed_view, cast, mapped_views, permuted_view, whole

_KINDS: Final[dict[str, RowKind]] = {
    "sum": "sum",
    "mean": "mean",
    "amax": "max",
    "amin": "min",
    "var": "var",
    "prod": "prod",
    "any": "any",
    "all": "all",
    "argmax": "argmax",
    "argmin": "argmin",
    "max": "max",
    "min": "min",
}
_DTYPES: Final = {"any": "bool", "all": "bool", "argmax": "int64", "argmin": "int64"}


def _reduce(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source: Any = node.args[0]
    rank = len(shape_of(source))
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    dims = list(range(rank)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    reduced = sorted(d % rank for d in dims)
    kind = _KINDS[aten_name(node.target)]
    remaining = [d for d in range(rank) if d not in reduced]
    value = low.numbers(source)
    wanted = "bool" if kind in ("any", "all") else "float32"
    if value.dtype != wanted:
        if value.dtype not in ("bool", "float32") or kind in ("any", "all"):
            raise NotImplementedError(f"{node.target} of {value.dtype}")
        value = Lazy(cast(value.expr if isinstance(value, Lazy) else value, wanted), value.shape, wanted)
    width = prod(shape_of(source)[d] for d in reduced)
    src = low.rows_of(mapped_views(value, lambda v: permuted_view(v, remaining + reduced)), width)
    dtype = native_dtype_name(node.meta["val"].dtype)
    if dtype != _DTYPES.get(kind, "float32"):
        raise NotImplementedError(f"{node.target} that gives {dtype}")
    dst = whole(low.buffer(src.shape[0], dtype), (src.shape[0],))
    correction = node.kwargs.get("correction", 1)
    number = float(1 if correction is None else correction)
    low.body.statements.append(RowWise(kind, dst, src, number, note=note_of(node)))
    return boxed_view(low.reshaped(dst, shape_of(node)), box)


def _of_all(over_dim: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The reduction of all numbers, by that over one dimension."""
    return lambda x, **options: over_dim(aten.view.default(x.contiguous(), [-1]), 0, **options)


def _with_place(value: Callable[..., Tensor], place: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The largest (or smallest) number along a dimension, and where it is."""
    return lambda x, dim, keepdim=False: (value(x, [dim], keepdim), place(x, dim, keepdim))


_REDUCE: Final = NativeOperator(lower=_reduce)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.sum.dim_IntList: _REDUCE,
    aten.sum.default: _REDUCE,
    aten.mean.dim: _REDUCE,
    aten.mean.default: _REDUCE,
    aten.amax.default: _REDUCE,
    aten.amin.default: _REDUCE,
    aten.max.default: _REDUCE,
    aten.min.default: _REDUCE,
    aten.var.correction: _REDUCE,
    aten.any.dim: _REDUCE,
    aten.any.dims: _REDUCE,
    aten.all.dim: _REDUCE,
    aten.prod.dim_int: _REDUCE,
    aten.argmax.default: _REDUCE,
    aten.argmin.default: _REDUCE,
}
DECOMPOSITIONS: Final = {
    aten.any.default: _of_all(aten.any.dim),
    aten.all.default: _of_all(aten.all.dim),
    aten.prod.default: _of_all(aten.prod.dim_int),
    aten.max.dim: _with_place(aten.amax.default, aten.argmax.default),
    aten.min.dim: _with_place(aten.amin.default, aten.argmin.default),
}
