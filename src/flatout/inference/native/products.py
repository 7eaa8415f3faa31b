"""Products of matrices: rows with a constant, which is packed, or with what is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.fx import Node

from flatout.inference.native import demand, pointwise
from flatout.inference.native.demand import Box, Span, aten, shape_of
from flatout.inference.native.lowering import Lowering
from flatout.inference.native.packing import (
    GROUP,
    Constants,
    by_columns,
    by_quads,
    by_rows,
    padded_bias,
    rounded,
    shifted_sums,
)
from flatout.inference.native.places import note_of
from flatout.inference.native.statements import Map, Product
from flatout.inference.native.values import LANES, Const, Lazy, Scalar, Value, View, sliced, whole, without

_DOTS = 4
"""Products with no more outputs sum along the depth: a block of 16 columns would be mostly zeros."""


def linear(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    args: Any = node.args
    bias, a, b = args if node.target == aten.addmm.default else (None, *args)
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("addmm with alpha or beta")
    depth = Span(0, shape_of(a)[1])
    return low_product(low, node, (a, (box[0], depth)), (b, (depth, box[1])), bias, box)


def low_product(low: Lowering, node: Any, a: tuple[Node, Box], b: tuple[Node, Box], bias: Any, box: Box) -> View:
    """One product of matrices: of rows with a constant, or of two that are computed."""
    m, k = (s.stop - s.start for s in a[1])
    n = b[1][1].stop - b[1][1].start
    x = low.rows_of(low.part(*a), *a, k)
    if (bias is not None and shape_of(bias)[-1:] != shape_of(node)[-1:]) or (
        bias is not None and len(shape_of(bias)) > 1 and m > 1
    ):
        raise NotImplementedError(f"addmm that adds a tensor of shape {shape_of(bias)}")
    value = low.part(*b)
    if isinstance(value, Const):
        return constant_product(low, node, x, b, bias, box[-1], (m, n, k))
    made = dynamic_product(low, node, x, value, (m, n, k))
    if bias is None:
        return made
    part = next(demand.by_element_of(bias, box))[1]
    added = pointwise.MADE["add"](made, low.expression(bias, part, made.shape))
    return low.materialised(Lazy(added, made.shape, "float32"))


def constant_product(
    low: Lowering, node: Any, x: View, b: tuple[Node, Box], bias: Any, columns: Span, sizes: tuple[int, int, int]
) -> View:
    """rows (m, k) times a weight (k, n)."""
    m, n, k = sizes
    source, part = b
    rows, cols = (slice(*span) for span in part)
    bias_view = None
    if bias is not None:
        if not isinstance(low.values[bias], Const):
            raise NotImplementedError("a bias that is computed")
        cut = slice(*columns)
        bias_buffer = low.block.add(f"{bias.name} bias {columns}", lambda c: padded_bias(c[bias].flatten()[cut]))
        bias_view = whole(bias_buffer, (bias_buffer.size,))
    taken = Taken(source, str(part), lambda c: c[source][rows, cols])
    is_dot = n <= _DOTS and k >= LANES and source.name not in low.int8
    width = n if is_dot else -(-n // LANES) * LANES
    dst = View(low.buffer(m * width), 0, (m, n), (width, 1))
    multiply(low, node, taken, x, dst, bias_view, is_dot=is_dot)
    return dst


class Taken(NamedTuple):
    """A matrix (k, n) of a constant: `part` tells it from others of the same source."""

    source: Node
    part: str
    matrix: Callable[[Constants], Tensor]


def multiply(
    low: Lowering, node: Any, taken: Taken, x: View, dst: View, bias: View | None, *, is_dot: bool = False
) -> None:
    """dst (rows, n) = bias + x (rows, k) times a constant, in 8 bits where that was asked for of it."""
    (source, part, matrix), n, k = taken, dst.shape[1], x.shape[1]

    def packed(kind: str, make: Callable[[Tensor], Tensor]) -> View:
        held = low.block.add(f"{source.name} {kind} {part}", lambda c: make(matrix(c)))
        return whole(held, (held.size,))

    if source.name in low.int8:
        w = packed("int8 numbers", lambda t: by_quads(rounded(t)[0]))
        scales = packed("int8 steps", lambda t: padded_bias(rounded(t)[1]))
        sums = packed("int8 sums", lambda t: shifted_sums(rounded(t)[0]))
        product = Product(dst, x, w, n, k, 0, 0, 1, bias, scales=scales, sums=sums, note=note_of(node))
    elif is_dot:
        row = -(-k // LANES) * LANES
        product = Product(dst, x, packed("rows", by_rows), n, k, row, 0, 1, bias, is_dot=True, note=note_of(node))
    else:
        w, group = packed("columns", by_columns), k * GROUP * LANES
        product = Product(dst, x, w, n, k, 0, group, partial_sums(n, k), bias, note=note_of(node))
    low.body.statements.append(product)
    low.layers.append((source.name, product))


def partial_sums(n: int, k: int) -> int:
    """Of each output: fewer blocks of columns need more, so that as many additions run beside each other."""
    blocks = -(-n // LANES)
    parts = 1 if blocks >= 8 else 2 if blocks >= 3 else 4
    return parts if k >= 8 * parts else 1


def dynamic_product(low: Lowering, node: Any, x: View, value: View | Lazy, sizes: tuple[int, int, int]) -> View:
    """rows (m, k) times what is computed (k, n)."""
    m, n, k = sizes
    width = -(-n // LANES) * LANES
    w = value if isinstance(value, View) else None
    if w is None or w.strides[1] != 1 or n % LANES or w.buffer.kind == "ring":
        buffer = low.buffer(k * width)
        if n % LANES:  # what the last block reads beyond must be numbers
            low.body.statements.append(Map(View(buffer, n, (k, width - n), (width, 1)), Scalar(0.0), "padding"))
        dst = View(buffer, 0, (k, n), (width, 1))
        w = low.materialised(value, dst)
    dst = View(low.buffer(m * width), 0, (m, n), (width, 1))
    low.body.statements.append(
        Product(dst, x, w, n, k, w.strides[0], GROUP * LANES, partial_sums(n, k), note=note_of(node))
    )
    return dst


def bmm(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    a, b = node.args
    k = shape_of(a)[2]
    batch, m, n = shape
    width = -(-n // LANES) * LANES
    x, w = low.part(a, (box[0], box[1], Span(0, k))), low.part(b, (box[0], Span(0, k), box[2]))
    left = (
        x
        if isinstance(x, View) and x.strides[2] == 1
        else low.materialised(low.viewed(x, a, (box[0], box[1], Span(0, k))))
    )
    right = low.viewed(w, b, (box[0], Span(0, k), box[2]))
    if not isinstance(right, View) or right.strides[2] != 1 or n % LANES or right.buffer.kind == "ring":
        buffer = low.buffer(batch * k * width)
        if n % LANES:
            low.body.statements.append(Map(View(buffer, n, (batch * k, width - n), (width, 1)), Scalar(0.0), "padding"))
        right = low.materialised(right, View(buffer, 0, (batch, k, n), (k * width, width, 1)))
    dst = View(low.buffer(batch * m * width), 0, (batch, m, n), (m * width, width, 1))
    for i in range(batch):
        rows, columns = (without(sliced(v, 0, i, i + 1), [0]) for v in (left, right))
        into = without(sliced(dst, 0, i, i + 1), [0])
        row = columns.strides[0]
        low.body.statements.append(
            Product(into, rows, columns, n, k, row, GROUP * LANES, partial_sums(n, k), note=note_of(node))
        )
    return dst
