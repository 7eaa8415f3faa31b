"""What a node of the graph becomes: memory seen through strides, an expression (and its text in C), or a constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = Literal["in", "out", "state", "ring", "work", "weight"]
ALIGNMENT = 64
"""Bytes: what all memory begins at."""
LANES = 16
"""Numbers of a block: of a packed weight's columns, and what buffers are padded to."""


@dataclass(eq=False)
class Buffer:
    """Memory of one event or stream; `size` counts numbers. A ring begins at its cursor's row, of `row` numbers."""

    name: str
    kind: Kind
    dtype: str
    size: int
    offset: int = 0
    """Within the block of its kind, in bytes; work buffers get theirs from the plan."""
    row: int = 0
    length: int = 0
    """Rows of a ring's window; twice as many are kept."""

    @property
    def item_bytes(self) -> int:
        """Bytes that one number takes."""
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def num_bytes(self) -> int:
        """Rounded up to whole cache lines."""
        return -(-self.size * self.item_bytes // ALIGNMENT) * ALIGNMENT


class View(NamedTuple):
    """Numbers of a buffer: `offset` and `strides` count numbers."""

    buffer: Buffer
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.buffer.dtype


class Scalar(NamedTuple):
    """A number of the program's own, never of a weight."""

    value: float | int | bool


class CExpression(NamedTuple):
    """A C expression over others, with {0}, {1}, ... for them."""

    template: str
    args: tuple[Expr, ...]
    dtype: str


Expr: TypeAlias = "View | Scalar | CExpression"


class Lazy(NamedTuple):
    """Numbers that are not computed yet. All views in `expr` have the shape `shape` (a stride is 0 where they repeat)."""

    expr: Expr
    shape: tuple[int, ...]
    dtype: str


class Const(NamedTuple):
    """Known when the model is built. `is_weight`: it depends on parameters, which may be exchanged."""

    tensor: Tensor
    is_weight: bool


Value: TypeAlias = "View | Lazy | Const"


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of numbers that lie one after the other.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return torch.empty(tuple(shape), device="meta").stride()


def whole(buffer: Buffer, shape: Sequence[int]) -> View:
    """All of a buffer in C order."""
    return View(buffer, 0, tuple(shape), contiguous_strides(shape))


def leaves(expr: Expr) -> Iterator[View]:
    """The views that an expression reads."""
    if isinstance(expr, View):
        yield expr
    elif isinstance(expr, CExpression):
        for arg in expr.args:
            yield from leaves(arg)


def num_operations(expr: Expr) -> int:
    """The number of calls in an expression."""
    return 1 + sum(map(num_operations, expr.args)) if isinstance(expr, CExpression) else 0


def mapped_views(value: View | Lazy, change: Callable[[View], View]) -> View | Lazy:
    """The value with each of its views seen another way, all of which get the same shape."""
    if isinstance(value, View):
        return change(value)
    shape = change(View(_NOWHERE, 0, value.shape, (0,) * len(value.shape))).shape
    return Lazy(_changed(value.expr, change), shape, value.dtype)


def _changed(expr: Expr, change: Callable[[View], View]) -> Expr:
    if isinstance(expr, View):
        return change(expr)
    if isinstance(expr, CExpression):
        return expr._replace(args=tuple(_changed(arg, change) for arg in expr.args))
    return expr


_NOWHERE = Buffer("nowhere", "work", "float32", 0)


# ------------------------------------------------------------------------------------------------- other ways to see a view


def permuted_view(view: View, dims: Sequence[int]) -> View:
    """The view with its dimensions in another order, as torch.permute does."""
    return view._replace(shape=tuple(view.shape[d] for d in dims), strides=tuple(view.strides[d] for d in dims))


def sliced_view(view: View, dim: int, start: int, stop: int, step: int = 1) -> View:
    """Elements start, start + step, ... below stop."""
    count = max(0, -(-(stop - start) // step))
    shape = (*view.shape[:dim], count, *view.shape[dim + 1 :])
    strides = (*view.strides[:dim], view.strides[dim] * step, *view.strides[dim + 1 :])
    return View(view.buffer, view.offset + start * view.strides[dim], shape, strides)


def boxed_view(view: View, box: Sequence[tuple[int, int]]) -> View:
    """The part from start to stop in each dimension."""
    for dim, (start, stop) in enumerate(box):
        view = sliced_view(view, dim, start, stop)
    return view


def view_without(view: View, dims: Sequence[int]) -> View:
    """The view without the dimensions `dims`, each of one element."""
    keep = [d for d in range(len(view.shape)) if d not in dims]
    return permuted_view(view, keep)


def with_one(view: View, dim: int) -> View:
    """The view with another dimension of one element at `dim`."""
    return view._replace(
        shape=(*view.shape[:dim], 1, *view.shape[dim:]), strides=(*view.strides[:dim], 0, *view.strides[dim:])
    )


def broadcast_view(view: View, shape: Sequence[int]) -> View:
    """Repeated to `shape`, as torch does."""
    missing = len(shape) - len(view.shape)
    old, by = (1,) * missing + view.shape, (0,) * missing + view.strides
    strides = tuple(0 if a == 1 and b != 1 else s for a, b, s in zip(old, shape, by, strict=True))
    return View(view.buffer, view.offset, tuple(shape), strides)


def reshaped_view(view: View, shape: Sequence[int]) -> View | None:
    """The same numbers in another shape; None where strides cannot say it."""
    if prod(shape) != prod(view.shape):
        return None
    try:
        strides = torch.empty_strided(view.shape, view.strides, device="meta").view(shape).stride()
    except RuntimeError:
        return None
    # Of one element there is nothing to step over: views that read the same numbers are equal.
    return View(
        view.buffer, view.offset, tuple(shape), tuple(s if n > 1 else 0 for n, s in zip(shape, strides, strict=True))
    )


# -- text in C ---------------------------------------------------------------------------------------------------------------


C_TYPES: Final = {
    "float32": "float",
    "int32": "int32_t",
    "int64": "int64_t",
    "bool": "uint8_t",
    "int8": "int8_t",
    "uint8": "uint8_t",
}


def dtype_of(expr: Expr) -> str:
    """The type of an expression's result."""
    if isinstance(expr, Scalar):
        return {bool: "bool", int: "int64", float: "float32"}[type(expr.value)]
    return expr.dtype


def cast(expr: Expr, dtype: str) -> Expr:
    """The expression in another type, converted as torch does."""
    have = dtype_of(expr)
    if have == dtype:
        return expr
    if isinstance(expr, Scalar):
        return Scalar({"float32": float, "bool": bool}.get(dtype, int)(expr.value))
    if dtype == "bool":
        return CExpression("({0} != 0)", (expr,), "bool")
    if have == "float32":  # outside its range C leaves the result open; so does torch
        return CExpression(f"fo_to_{dtype}({{0}})", (expr,), dtype)
    return CExpression(f"(({C_TYPES[dtype]})({{0}}))", (expr,), dtype)


def promoted(args: Sequence[Expr]) -> str:
    """The type in which all of the expressions can be compared."""
    dtypes = {dtype_of(a) for a in args}
    return "float32" if "float32" in dtypes else "int64" if dtypes - {"bool"} else "bool"


def literal(value: float | bool, dtype: str) -> str:
    """A number as C writes it."""
    if dtype != "float32":
        return str(int(value)) if dtype == "bool" else f"INT64_C({int(value)})"
    value = float(value)
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    if abs(value) > 3.4028235677973366e38:  # as torch rounds a double to float32
        return "INFINITY" if value > 0 else "-INFINITY"
    text = repr(value)
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


def text_of(expr: Expr, load: Callable[[View], str]) -> str:
    """The C text of an expression; `load` gives that of a view."""
    if isinstance(expr, View):
        return load(expr)
    if isinstance(expr, Scalar):
        return literal(expr.value, dtype_of(expr))
    return expr.template.format(*(text_of(arg, load) for arg in expr.args))
