"""States that are windows: the oldest row goes, a new one comes. They turn in place; nothing is moved but the new row."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from torch.fx import Node

from flatout.inference.native.demand import aten, dim_of, shape_of, slice_of
from flatout.inference.native.values import Buffer, View


class Window(NamedTuple):
    """A state that is shifted by one along `dim`.

    `joined` is the window with the new row, or the one that has lost its oldest.
    """

    joined: Node
    newest: Node
    dim: int
    is_longer: bool
    """Whether `joined` still has the oldest row: it is one longer than the state."""


def window_of(old: Node, new: Node) -> Window | None:
    """How `new` follows from `old`; None when it is no shift by one row."""
    if new.target == aten.slice.Tensor:
        joined: Any = new.args[0]
        dim, start, stop, step = slice_of(new)
        parts = _parts(joined, dim)
        if (
            parts
            and parts[0] is old
            and (start, step) == (1, 1)
            and stop == shape_of(joined)[dim]
            and _is_one(parts, dim)
        ):
            return Window(joined, parts[1], dim, True)
    if new.target == aten.cat.default:
        for dim in range(len(shape_of(new))):
            parts = _parts(new, dim)
            if parts and parts[0].target == aten.slice.Tensor and parts[0].args[0] is old and _is_one(parts, dim):
                at, start, stop, step = slice_of(parts[0])
                if (at, start, step) == (dim, 1, 1) and stop == shape_of(old)[dim]:
                    return Window(new, parts[1], dim, False)
    return None


def seen_again(window: Window, old: Node) -> list[Window]:
    """Other nodes that join the same window with the same row, or its newer part."""
    found = []
    for node in {*old.users, *(user for part in old.users for user in part.users)}:
        if node is window.joined:
            continue
        parts = _parts(node, window.dim)
        if parts and parts[0] is old and parts[1] is window.newest:
            found.append(Window(node, window.newest, window.dim, True))
        elif parts and parts[1] is window.newest and _is_newer(parts[0], old, window.dim):
            found.append(Window(node, window.newest, window.dim, False))
    return found


def _is_newer(node: Any, old: Node, dim: int) -> bool:
    """All of a window but its oldest row."""
    if node.target != aten.slice.Tensor or node.args[0] is not old:
        return False
    return slice_of(node) == (dim, 1, shape_of(old)[dim], 1)


def _parts(node: Any, dim: int) -> list[Node]:
    """The two parts of a cat along `dim`."""
    if not isinstance(node, Node) or node.target != aten.cat.default:
        return []
    args: Any = node.args
    joined_along = dim_of(node, args[1] if len(args) > 1 else 0)
    return list(args[0]) if len(args[0]) == 2 and joined_along == dim else []


def _is_one(parts: list[Node], dim: int) -> bool:
    return parts[0] is not parts[1] and shape_of(parts[1])[dim] == 1


def ring(name: str, dtype: str, shape: tuple[int, ...], dim: int, offset: int) -> tuple[Buffer, View]:
    """Twice as many rows as the window has: wherever it begins, its rows lie one after the other. And the window."""
    length, row = shape[dim], prod(shape) // shape[dim]
    buffer = Buffer(name, "ring", dtype, 2 * length * row, offset, row, length)
    return buffer, seen(buffer, shape, dim)


def seen(buffer: Buffer, shape: tuple[int, ...], dim: int, first: int = 0) -> View:
    """A window's rows from `first` on, in the shape of the state."""
    rest = [n for d, n in enumerate(shape) if d != dim]
    strides = [prod(rest[i + 1 :]) for i in range(len(rest))]
    strides.insert(dim, buffer.row)
    return View(buffer, first * buffer.row, shape, tuple(strides))
