"""From the graph of core ATen operators to statements: views cost nothing, element-wise work joins what needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch.fx import Node

from flatout.errors import NativeError
from flatout.inference.native import demand, pointwise, rings
from flatout.inference.native.demand import Box, shape_of
from flatout.inference.native.packing import Block
from flatout.inference.native.places import ADVICE, dtype_name, note_of, told_at
from flatout.inference.native.rings import Window
from flatout.inference.native.statements import Body, Map, Product, Push
from flatout.inference.native.values import (
    LANES,
    Buffer,
    Const,
    Expr,
    Lazy,
    Scalar,
    Value,
    View,
    broadcast,
    leaves,
    mapped,
    num_operations,
    permuted,
    reshaped,
    sliced,
    whole,
)

_LONGEST = 40
"""Operations of one expression: longer ones would be hard to read and slow to compile."""


class Lowering:
    """One pass over the graph, in its order. `kept` are values that inputs and states have from the start."""

    def __init__(
        self,
        nodes: list[Node],
        outputs: list[Node],
        constants: dict[Node, Const],
        kept: dict[Node, View],
        shelf: Mapping[object, Callable[[Lowering, Any, Box, tuple[int, ...]], Value]],
    ) -> None:
        self.nodes, self._shelf = nodes, shelf
        self.boxes = demand.demands(nodes, outputs)
        self.values: dict[Node, Value] = {**constants, **kept}
        self.boxes |= {node: demand.full(node) for node in self.values}
        self.body, self.block = Body(), Block({node: const.tensor for node, const in constants.items()})
        self.outputs = set(outputs)
        self.wanted: dict[Node, View] = {}
        """Outputs' own memory, which the values that go there are computed into."""
        self.layers: list[tuple[str, Product]] = []
        self.int8: frozenset[str] = frozenset()
        """Weights whose products are to be in 8 bits, by the name of the node that holds them."""
        self.windows: dict[Node, tuple[Window, Buffer]] = {}
        """Nodes that join a state's window with its new row."""
        self._count = 0

    def run(self) -> None:
        """Lower all that is needed. Raises NativeError with the operator and the line of the model."""
        for node in self.nodes:
            if node.op != "call_function" or node in self.values or node not in self.boxes:
                continue
            try:
                value = self._lowered(node)
            except NotImplementedError as e:
                raise NativeError(f"{e}{told_at(node)}; {ADVICE}") from e
            self.values[node] = self._settled(node, value)

    # ------------------------------------------------------------------------------------------------------- values

    def part(self, source: Any, box: Box | None = None) -> Value:
        """A part of what a node gave; a number as it is."""
        if not isinstance(source, Node):
            return Const(torch.tensor(source), is_weight=False)
        value = self.values[source]
        box = demand.full(source) if box is None else box
        have = self.boxes[source]
        if isinstance(value, Const):
            tensor = value.tensor[tuple(slice(*span) for span in box)] if box != demand.full(source) else value.tensor
            return Const(tensor, value.is_weight)
        for dim, (span, outer) in enumerate(zip(box, have, strict=True)):
            if span != outer:
                value = mapped(
                    value, partial(sliced, dim=dim, start=span.start - outer.start, stop=span.stop - outer.start)
                )
        return value

    def expression(self, source: Any, box: Box | None, shape: tuple[int, ...]) -> Expr:
        """A part as an expression over `shape`, to which it is repeated."""
        if not isinstance(source, Node):
            return Scalar(source)
        value = self.part(source, box)
        if isinstance(value, Const):
            if value.tensor.numel() == 1 and not value.is_weight:
                return Scalar(value.tensor.item())
            value = self.constant_view(source, box)
        if isinstance(value, Lazy) and prod(value.shape) < prod(shape) and num_operations(value.expr):
            value = self.materialised(value)
        value = mapped(value, lambda v: broadcast(v, shape))
        return value.expr if isinstance(value, Lazy) else value

    def constant_view(self, source: Node, box: Box | None = None) -> View:
        """A constant, or a part of it, in the block of weights."""
        value = self.part(source, box)
        assert isinstance(value, Const)
        if box is None or box == demand.full(source):
            return self.block.view(source)
        whole_view = self.block.view(source)
        for dim, span in enumerate(box):
            whole_view = sliced(whole_view, dim, *span)
        return whole_view

    def view(self, source: Any, box: Box | None = None) -> View:
        """A part in memory."""
        value = self.part(source, box)
        if isinstance(value, Const):
            return self.constant_view(source, box)
        return value if isinstance(value, View) else self.materialised(value)

    def buffer(self, size: int, dtype: str = "float32") -> Buffer:
        """Work memory, rounded up so that the last block may be written whole."""
        made = Buffer(f"b{self._count}", "work", dtype, -(-size // LANES) * LANES)
        self._count += 1
        self.body.buffers.append(made)
        return made

    def materialised(self, value: Lazy | View, into: View | None = None, note: str = "") -> View:
        """In memory, one after the other."""
        dst = into or whole(self.buffer(prod(value.shape), value.dtype), value.shape)
        self.body.statements.append(Map(dst, value.expr if isinstance(value, Lazy) else value, note))
        return dst

    def rows_of(self, value: Value, source: Any, box: Box | None, width: int) -> View:
        """(rows, width), each row's numbers one after the other."""
        if isinstance(value, Const):
            value = self.constant_view(source, box)
        shape = (prod(value.shape) // width if width else 0, width)
        if isinstance(value, View):
            seen = reshaped(value, shape)
            if seen is not None and (seen.strides[1] == 1 or width == 1):
                return seen
        seen = reshaped(self.materialised(value), shape)
        assert seen is not None
        return seen

    def _settled(self, node: Any, value: Value) -> Value:
        """Memory for what is read more than once, has grown long, or goes out."""
        if not isinstance(value, Lazy):
            return value
        into = self.wanted.get(node)
        if into is not None and value.shape == into.shape:
            return self.materialised(value, into, note_of(node))
        users = [u for u in node.users if u in self.boxes or u.op == "output"]
        size = num_operations(value.expr)
        if size and (len(users) > 1 or size > _LONGEST or node in self.outputs):
            return self.materialised(value, self._like(value), note_of(node))
        return value

    def _like(self, value: Lazy) -> View | None:
        """New memory in which numbers lie in the order of what they are made of."""
        views = [
            v
            for v in leaves(value.expr)
            if prod(v.shape) > 1 and all(s or n == 1 for n, s in zip(v.shape, v.strides, strict=True))
        ]
        if not views:
            return None
        order = sorted(
            range(len(value.shape)), key=lambda d: -views[0].strides[d] if value.shape[d] > 1 else -prod(value.shape)
        )
        dst = whole(self.buffer(prod(value.shape), value.dtype), [value.shape[d] for d in order])
        return permuted(dst, [order.index(d) for d in range(len(order))])

    # ---------------------------------------------------------------------------------------------------- operators

    def _lowered(self, node: Any) -> Value:
        if node in self.windows:
            return self._window(node)
        box = self.boxes[node]
        shape = tuple(span.stop - span.start for span in box)
        special = self._shelf.get(node.target)
        if special is not None:
            return special(self, node, box, shape)
        if pointwise.is_pointwise(node):
            return self._pointwise(node, box, shape)
        raise NotImplementedError(f"operator {node.target} has no native code")

    def _window(self, node: Any) -> View:
        """The new row goes behind the window; the whole is seen in place."""
        window, ring = self.windows[node]
        self.boxes[node] = demand.full(node)
        if not any(isinstance(s, Push) and s.ring is ring for s in self.body.statements):
            first = [window.dim, *(d for d in range(len(shape_of(node))) if d != window.dim)]
            value = self.viewed(self.part(window.newest), window.newest, demand.full(window.newest))
            row = self.rows_of(mapped(value, lambda v: permuted(v, first)), window.newest, None, ring.row)
            self.body.statements.append(Push(ring, row, note_of(node)))
        return rings.seen(ring, shape_of(node), window.dim, 0 if window.is_longer else 1)

    def viewed(self, value: Value, source: Any, box: Box | None) -> View | Lazy:
        """A part, a constant as it lies in memory."""
        return self.constant_view(source, box) if isinstance(value, Const) else value

    def _pointwise(self, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
        def one(arg: Any) -> Any:
            if isinstance(arg, Node):
                part = next(demand.by_element_of(arg, box))[1]
                return self.expression(arg, part, shape)
            return None if arg is None else Scalar(arg)

        dtype = dtype_name(node.meta["val"].dtype)
        options = {k: v for k, v in node.kwargs.items() if k in ("alpha", "rounding_mode", "approximate")}
        if pointwise.name_of(node.target) not in pointwise.SAME and set(node.kwargs) - set(options):
            raise NotImplementedError(f"{node.target} with {', '.join(sorted(set(node.kwargs) - set(options)))}")
        args = node.args[:1] if pointwise.name_of(node.target) in pointwise.SAME else node.args
        return Lazy(pointwise.expression(node, [one(a) for a in args], options, dtype), shape, dtype)

    def seen(self, node: Any, box: Box) -> View | Lazy:
        """The part of a view's source."""
        source, part = next(demand.RULES[node.target](node, box))
        value = self.part(source, part)
        if isinstance(value, Const):
            return self.constant_view(source, part)
        return value
