"""Native code of ATen operators: how the files in `operators` declare it, and all that they declare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch.fx import Node

from flatout.blocks.inference.native.nodes import Box, broadcast_box, shape_of
from flatout.blocks.inference.native.values import Value
from flatout.core.registry import constants

_PACKAGE: Final = "flatout.blocks.inference.native.operators"
Lower: TypeAlias = Callable[[Any, Node, Box, tuple[int, ...]], Value]
"""From the Lowering, a node, the part of it that is needed, and that part's shape to a value. NotImplementedError: what is not
supported."""
InputRule: TypeAlias = Callable[[Node, Box], Iterator[tuple[Node, Box]]]
"""Inputs of a node, each with the part of it that a part of the node needs."""


@dataclass(frozen=True, kw_only=True)
class NativeOperator:
    """Native code for one ATen operator, as the files in `operators` declare it."""

    lower: Lower
    inputs: InputRule | None = None
    """The part of each input that a part of the result needs; None: all of every input."""
    complete_dims: Callable[[Node], set[int]] | None = None
    """Dimensions of the result that cannot be computed in part; None: there are none."""
    replaces_decomposition: bool = False
    """Whether torch would decompose the operator, which is slower than the code here."""


def by_element(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    """Each element needs those that broadcast to it."""
    for source in node.all_input_nodes:
        if len(shape_of(source)) <= len(box):
            yield source, broadcast_box(source, box)


def same_box(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    """The first input's part is the node's own."""
    yield node.args[0], box


@cache
def operators() -> Mapping[object, NativeOperator]:
    """Native code by ATen overload (`aten.mm.default`), or by ATen operator for all of its overloads (`aten.exp`)."""
    found: dict[object, NativeOperator] = {}
    for family in constants(_PACKAGE, "OPERATORS"):
        assert not found.keys() & family.keys(), f"two files have {found.keys() & family.keys()}"
        found |= family
    return found


def operator_of(target: object) -> NativeOperator | None:
    """The native code for a node's target: of its overload, or of all overloads."""
    return operators().get(target) or operators().get(getattr(target, "overloadpacket", None))


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Python functions for operators that torch.export replaces: torch's own, and those for operators without native code."""
    found: dict[Any, Callable[..., Any]] = {**torch.export.default_decompositions()}
    for target, operator in operators().items():
        if operator.replaces_decomposition:
            found.pop(target, None)
    for family in constants(_PACKAGE, "DECOMPOSITIONS"):
        found |= family
    return found
