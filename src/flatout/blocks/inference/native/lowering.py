"""The graph of core ATen operators becomes statements: views cost nothing, element-wise work joins what needs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from flatout.blocks.inference.native.nodes import (
    ADVICE,
    Box,
    IndexRange,
    aten,
    box_union,
    full_box,
    note_of,
    positive_dim,
    shape_of,
    slice_of,
    source_line,
)
from flatout.blocks.inference.native.operator_table import NativeOperator, operator_of
from flatout.blocks.inference.native.packing import WeightBlock
from flatout.blocks.inference.native.statements import Map, MatrixProduct, ProgramBody, Push
from flatout.blocks.inference.native.values import (
    LANES,
    Buffer,
    Const,
    Expr,
    Lazy,
    Scalar,
    Value,
    View,
    boxed_view,
    broadcast_view,
    contiguous_strides,
    leaves,
    mapped_views,
    num_operations,
    permuted_view,
    reshaped_view,
    sliced_view,
    whole,
)
from flatout.core.errors import NativeError

_LONGEST = 40
"""Operations of one expression: longer ones would be hard to read and slow to compile."""


class Lowering:
    """One pass over the graph, in its order. `inputs` are the values of inputs and states."""

    def __init__(
        self,
        nodes: list[Node],
        outputs: list[Node],
        constants: dict[Node, Const],
        inputs: dict[Node, View],
    ) -> None:
        self.nodes = nodes
        self.boxes = _demands(nodes, outputs)
        self.values: dict[Node, Value] = {**constants, **inputs}
        self.boxes |= {node: full_box(node) for node in self.values}
        self.body, self.block = ProgramBody(), WeightBlock({node: const.tensor for node, const in constants.items()})
        self.outputs = set(outputs)
        self.wanted: dict[Node, View] = {}
        """Outputs' own memory, which the values that go there are computed into."""
        self.layers: list[tuple[str, MatrixProduct]] = []
        self.int8: frozenset[str] = frozenset()
        """Weights whose products are to be in 8 bits, by the name of the node that holds them."""
        self.windows: dict[Node, tuple[StateWindow, Buffer]] = {}
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
                raise NativeError(f"{e}{source_line(node)}; {ADVICE}") from e
            self.values[node] = self._settled(node, value)

    # ------------------------------------------------------------------------------------------------------- values

    def part(self, source: Any, box: Box | None = None) -> Value:
        """A part of what a node gave; a number as it is."""
        if not isinstance(source, Node):
            return Const(torch.tensor(source), is_weight=False)
        value = self.values[source]
        box = full_box(source) if box is None else box
        have = self.boxes[source]
        if isinstance(value, Const):
            tensor = value.tensor[tuple(slice(*span) for span in box)] if box != full_box(source) else value.tensor
            return Const(tensor, value.is_weight)
        for dim, (span, outer) in enumerate(zip(box, have, strict=True)):
            if span != outer:
                value = mapped_views(
                    value, partial(sliced_view, dim=dim, start=span.start - outer.start, stop=span.stop - outer.start)
                )
        return value

    def expression(self, source: Any, box: Box | None, shape: tuple[int, ...]) -> Expr:
        """A part as an expression over `shape`, to which it is repeated."""
        if not isinstance(source, Node):
            return Scalar(source)
        value = self.part(source, box)
        if isinstance(value, Const) and value.tensor.numel() == 1 and not value.is_weight:
            return Scalar(value.tensor.item())
        value = self.numbers(source, box)
        if isinstance(value, Lazy) and prod(value.shape) < prod(shape) and num_operations(value.expr):
            value = self.materialised(value)
        value = mapped_views(value, lambda v: broadcast_view(v, shape))
        return value.expr if isinstance(value, Lazy) else value

    def constant_view(self, source: Node, box: Box | None = None) -> View:
        """A constant, or a part of it, in the block of weights."""
        return boxed_view(self.block.view(source), full_box(source) if box is None else box)

    def numbers(self, source: Any, box: Box | None = None) -> View | Lazy:
        """What a node gave, or a part of it; a constant as it lies in memory."""
        value = self.part(source, box)
        return self.constant_view(source, box) if isinstance(value, Const) else value

    def view(self, source: Any, box: Box | None = None) -> View:
        """The numbers of a node, or of a part of it, in memory."""
        value = self.numbers(source, box)
        return value if isinstance(value, View) else self.materialised(value)

    def buffer(self, size: int, dtype: str = "float32") -> Buffer:
        """Work memory, rounded up so that the last block may be written whole."""
        work = Buffer(f"b{self._count}", "work", dtype, -(-size // LANES) * LANES)
        self._count += 1
        self.body.buffers.append(work)
        return work

    def materialised(self, value: Lazy | View, into: View | None = None, note: str = "") -> View:
        """Compute the numbers of a value into memory, one after the other."""
        dst = into or whole(self.buffer(prod(value.shape), value.dtype), value.shape)
        self.body.statements.append(Map(dst, value.expr if isinstance(value, Lazy) else value, note))
        return dst

    def rows_of(self, value: View | Lazy, width: int, note: str = "") -> View:
        """(rows, width), each row's numbers one after the other."""
        shape = (prod(value.shape) // width if width else 0, width)
        rows = reshaped_view(value, shape) if isinstance(value, View) else None
        if rows is not None and (rows.strides[1] == 1 or width == 1):
            return rows
        return self.reshaped(self.materialised(value, note=note), shape)

    def reshaped(self, view: View, shape: Sequence[int]) -> View:
        """The same numbers in another shape; copied where strides cannot express it."""
        result = reshaped_view(view, shape) or reshaped_view(self.materialised(view), shape)
        assert result is not None
        return result

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
        return permuted_view(dst, [order.index(d) for d in range(len(order))])

    # ---------------------------------------------------------------------------------------------------- operators

    def _lowered(self, node: Any) -> Value:
        if node in self.windows:
            return self._window(node)
        operator = operator_of(node.target)
        if operator is None:
            raise NotImplementedError(f"operator {node.target} has no native code")
        box = self.boxes[node]
        return operator.lower(self, node, box, tuple(part.stop - part.start for part in box))

    def _window(self, node: Any) -> View:
        """The new row goes behind the window; all rows are read in place."""
        window, ring = self.windows[node]
        self.boxes[node] = full_box(node)
        if not any(isinstance(s, Push) and s.ring is ring for s in self.body.statements):
            first = [window.dim, *(d for d in range(len(shape_of(node))) if d != window.dim)]
            value = self.numbers(window.newest)
            row = self.rows_of(mapped_views(value, lambda v: permuted_view(v, first)), ring.row)
            self.body.statements.append(Push(ring, row, note_of(node)))
        return window_view(ring, shape_of(node), window.dim, 0 if window.is_longer else 1)

    def input_part(self, node: Any, box: Box) -> View | Lazy:
        """The part of its first input that a part of a view, or of a copy, is."""
        operator = operator_of(node.target)
        assert operator is not None and operator.inputs is not None
        return self.numbers(*next(operator.inputs(node, box)))


# ------------------------------------------------------------------------------------------------------------- demand


def _demands(nodes: list[Node], outputs: list[Node]) -> dict[Node, Box]:
    """The part of each node that the outputs need: a box around what all readers need. What is outside is never computed."""
    needed: dict[Node, Box] = {node: full_box(node) for node in outputs}
    for node in reversed(nodes):
        if node not in needed or node.op != "call_function":
            continue
        operator = operator_of(node.target)
        if operator is not None and operator.complete_dims is not None:
            needed[node] = _completed(node, needed[node], operator.complete_dims(node))
        for source, box in _inputs_of(node, needed[node], operator).items():
            needed[source] = box_union(needed[source], box) if source in needed else box
    return needed


def _completed(node: Node, box: Box, dims: set[int]) -> Box:
    return tuple(
        IndexRange(0, n) if d in dims else part for d, (n, part) in enumerate(zip(shape_of(node), box, strict=True))
    )


def _inputs_of(node: Any, box: Box, operator: NativeOperator | None) -> dict[Node, Box]:
    rule = operator.inputs if operator is not None else None
    wanted: dict[Node, Box] = {}
    for source, part in rule(node, box) if rule else ():
        wanted[source] = box_union(wanted[source], part) if source in wanted else part
    for source in dict.fromkeys(node.all_input_nodes):
        if source not in wanted and node.target != aten.cat.default:  # what a cat does not touch is not needed
            wanted[source] = full_box(source)
    return wanted


# -- states that are windows -------------------------------------------------------------------------------------------------


class StateWindow(NamedTuple):
    """A state that is shifted by one along `dim`.

    `joined` is the window with the new row, or the one that has lost its oldest.
    """

    joined: Node
    newest: Node
    dim: int
    is_longer: bool
    """Whether `joined` still has the oldest row: it is one longer than the state."""


def shift_window(old: Node, new: Any) -> StateWindow | None:
    """How `new` follows from `old`; None when it is no shift by one row."""
    joined = new.args[0] if new.target == aten.slice.Tensor else new
    for dim in range(len(shape_of(new))):
        parts = _parts(joined, dim)
        if not parts or shape_of(parts[1])[dim] != 1:
            continue
        if parts[0] is old and joined is not new and _is_newer(new, joined, dim):
            return StateWindow(joined, parts[1], dim, True)
        if joined is new and _is_newer(parts[0], old, dim):
            return StateWindow(joined, parts[1], dim, False)
    return None


def other_windows(window: StateWindow, old: Node) -> list[StateWindow]:
    """Other nodes that join the same window with the same row, or its newer part."""
    found = []
    for node in {*old.users, *(user for part in old.users for user in part.users)} - {window.joined}:
        parts = _parts(node, window.dim)
        if parts and parts[1] is window.newest and (parts[0] is old or _is_newer(parts[0], old, window.dim)):
            found.append(StateWindow(node, window.newest, window.dim, parts[0] is old))
    return found


def _is_newer(node: Any, old: Node, dim: int) -> bool:
    """All of a window but its oldest row."""
    if node.target != aten.slice.Tensor or node.args[0] is not old:
        return False
    return slice_of(node) == (dim, 1, shape_of(old)[dim], 1)


def _parts(node: Any, dim: int) -> list[Node]:
    """The two parts of a cat along `dim`, which are not the same."""
    if node.target != aten.cat.default or len(node.args[0]) != 2:
        return []
    joined_along = positive_dim(node, node.args[1] if len(node.args) > 1 else 0)
    return list(node.args[0]) if joined_along == dim and node.args[0][0] is not node.args[0][1] else []


def ring(name: str, dtype: str, shape: tuple[int, ...], dim: int, offset: int) -> tuple[Buffer, View]:
    """Twice as many rows as the window has: wherever it begins, its rows lie one after the other. And the window."""
    length, row = shape[dim], prod(shape) // shape[dim]
    buffer = Buffer(name, "ring", dtype, 2 * length * row, offset, row, length)
    return buffer, window_view(buffer, shape, dim)


def window_view(buffer: Buffer, shape: tuple[int, ...], dim: int, first: int = 0) -> View:
    """A window's rows from `first` on, in the shape of the state."""
    strides = list(contiguous_strides([n for d, n in enumerate(shape) if d != dim]))
    strides.insert(dim, buffer.row)
    return View(buffer, first * buffer.row, shape, tuple(strides))
