"""What a node of the graph becomes: memory seen through strides, an expression that is not computed yet, or a constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor

Kind: TypeAlias = Literal["in", "out", "state", "ring", "work", "weight"]
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


class Call(NamedTuple):
    """A C expression over others, with {0}, {1}, ... for them."""

    template: str
    args: tuple[Expr, ...]
    dtype: str


Expr: TypeAlias = "View | Scalar | Call"


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
    """Of numbers one after the other.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides)) if shape else ()


def whole(buffer: Buffer, shape: Sequence[int]) -> View:
    """All of a buffer in C order."""
    return View(buffer, 0, tuple(shape), contiguous_strides(shape))


def leaves(expr: Expr) -> Iterator[View]:
    """The views that an expression reads."""
    if isinstance(expr, View):
        yield expr
    elif isinstance(expr, Call):
        for arg in expr.args:
            yield from leaves(arg)


def num_operations(expr: Expr) -> int:
    """Calls in an expression."""
    return 1 + sum(map(num_operations, expr.args)) if isinstance(expr, Call) else 0


def mapped(value: View | Lazy, change: Callable[[View], View]) -> View | Lazy:
    """The value with each of its views seen another way, all of which get the same shape."""
    if isinstance(value, View):
        return change(value)
    shape = change(_shaped(value.shape)).shape
    return Lazy(_changed(value.expr, change), shape, value.dtype)


def _changed(expr: Expr, change: Callable[[View], View]) -> Expr:
    if isinstance(expr, View):
        return change(expr)
    if isinstance(expr, Call):
        return expr._replace(args=tuple(_changed(arg, change) for arg in expr.args))
    return expr


_NOWHERE = Buffer("nowhere", "work", "float32", 0)


def _shaped(shape: tuple[int, ...]) -> View:
    return View(_NOWHERE, 0, shape, (0,) * len(shape))


# ------------------------------------------------------------------------------------------------- other ways to see a view


def permuted(view: View, dims: Sequence[int]) -> View:
    """As torch's."""
    return view._replace(shape=tuple(view.shape[d] for d in dims), strides=tuple(view.strides[d] for d in dims))


def sliced(view: View, dim: int, start: int, stop: int, step: int = 1) -> View:
    """Elements start, start + step, ... below stop."""
    count = max(0, -(-(stop - start) // step))
    shape = (*view.shape[:dim], count, *view.shape[dim + 1 :])
    strides = (*view.strides[:dim], view.strides[dim] * step, *view.strides[dim + 1 :])
    return View(view.buffer, view.offset + start * view.strides[dim], shape, strides)


def without(view: View, dims: Sequence[int]) -> View:
    """Without dimensions of one element."""
    keep = [d for d in range(len(view.shape)) if d not in dims]
    return permuted(view, keep)


def with_one(view: View, dim: int) -> View:
    """With another dimension of one element."""
    return view._replace(
        shape=(*view.shape[:dim], 1, *view.shape[dim:]), strides=(*view.strides[:dim], 0, *view.strides[dim:])
    )


def broadcast(view: View, shape: Sequence[int]) -> View:
    """Repeated to `shape`, as torch does."""
    missing = len(shape) - len(view.shape)
    old, by = (1,) * missing + view.shape, (0,) * missing + view.strides
    strides = tuple(0 if a == 1 and b != 1 else s for a, b, s in zip(old, shape, by, strict=True))
    return View(view.buffer, view.offset, tuple(shape), strides)


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """The same numbers in another shape; None where strides cannot say it."""
    if prod(shape) != prod(view.shape):
        return None
    if prod(shape) <= 1:
        return View(view.buffer, view.offset, tuple(shape), (0,) * len(shape))
    # runs of dimensions that lie one in the other, outermost first: (elements, innermost stride)
    runs: list[list[int]] = []
    for length, stride in zip(view.shape, view.strides, strict=True):
        if length == 1:
            continue
        if runs and runs[-1][1] == stride * length and (stride or not runs[-1][1]):
            runs[-1] = [runs[-1][0] * length, stride]
        else:
            runs.append([length, stride])
    strides, left = [], [list(run) for run in reversed(runs)]
    for length in reversed(shape):
        if length == 1:
            strides.append(0)
            continue
        while left and left[0][0] == 1:
            left.pop(0)
        if not left or left[0][0] % length:
            return None
        strides.append(left[0][1])
        left[0][0] //= length
        left[0][1] *= length
    return View(view.buffer, view.offset, tuple(shape), tuple(reversed(strides)))
