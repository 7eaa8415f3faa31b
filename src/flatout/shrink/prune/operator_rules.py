"""Calls of operators as the rules of pruning see them, and the table of rules by operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Union

from torch.fx import Node

from flatout.shrink.prune.terms import PINNED, Dim, UnitTerms


@dataclass(frozen=True)
class Shape:
    """A tensor: one list of terms for each of its dimensions."""

    dims: tuple[Dim, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(dim) for dim in self.dims)

    def with_dim(self, place: int, dim: Dim) -> Shape:
        """The shape with another dimension at that place."""
        dims = list(self.dims)
        dims[place] = dim
        return Shape(tuple(dims))


Value = Union[Shape, "list[Value]", None]


@dataclass(frozen=True)
class AtenCall:
    """An operator's call: its arguments by the names of its schema, tensors as shapes."""

    terms: UnitTerms
    node: Node
    name: str
    args: dict[str, Any]
    sizes: list[tuple[Node, str, Dim]]
    """(node, attribute, the dimension whose size it is): what a rule adds is set in the module that made the node, where it
    has such an attribute."""

    def shape(self, *names: str) -> Shape:
        """The tensor under the first of these names that the schema has."""
        for name in names:
            found = self.args.get(name)
            if isinstance(found, Shape):
                return found
        raise KeyError(names)

    def maybe(self, name: str) -> Shape | None:
        found = self.args.get(name)
        return found if isinstance(found, Shape) else None

    def out_sizes(self) -> tuple[int, ...]:
        return sizes_of(self.node.meta["val"])

    def pin(self, dims: Iterable[Dim], why: str | None = None) -> None:
        """Keep every unit of these dimensions."""
        for dim in dims:
            self.terms.pin(dim, why)

    def tie_vectors(self, dim: Dim, *names: str) -> None:
        """Tie the vectors under these names, where there are such, to a dimension."""
        for name in names:
            if shape := self.maybe(name):
                self.terms.tie(dim, shape.dims[0])

    def pin_all(self, why: str | None = None) -> Value:
        """Keep every unit of what goes in; what comes out is pinned."""
        for shape in shapes_in(self.args):
            self.pin(shape.dims, why)
        return pinned_like(self.node.meta.get("val"))


Rule = Callable[[AtenCall], Value]
RULES: dict[str, Rule] = {}


def operator_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of ATen, by their names without overload."""

    def keep(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return keep


def sizes_of(value: object) -> tuple[int, ...]:
    return tuple(int(size) for size in getattr(value, "shape", ()))


def pinned(size: int) -> Dim:
    return [PINNED] * size


def pinned_like(value: object) -> Value:
    """Shapes of what a node gave, all pinned."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "shape"):
        return [pinned_like(part) for part in value]
    return Shape(tuple(pinned(size) for size in sizes_of(value))) if hasattr(value, "shape") else None


def shapes_in(value: object) -> list[Shape]:
    if isinstance(value, Shape):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [shape for part in parts for shape in shapes_in(part)]


def broadcast_units(terms: UnitTerms, shapes: Sequence[Shape]) -> list[Dim]:
    """Tie dimensions that are lined up from the right; those of size 1 take the other's units."""
    rank = max((len(shape.dims) for shape in shapes), default=0)
    dims: list[Dim] = []
    for place in range(-rank, 0):
        found = [shape.dims[place] for shape in shapes if len(shape.dims) >= -place]
        widest = max(found, key=len)
        for dim in found:
            if len(dim) == len(widest) and len(dim) > 1:
                terms.tie(widest, dim)
        dims.append(widest)
    return dims
