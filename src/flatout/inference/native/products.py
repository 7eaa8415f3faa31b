"""Products of matrices: rows with a constant, which is packed, or with what is computed."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from flatout.inference.native import demand, pointwise
from flatout.inference.native.demand import Box, Span, aten, shape_of
from flatout.inference.native.lowering import Lowering
from flatout.inference.native.packing import GROUP, by_columns, by_quads, by_rows, padded_bias, rounded, shifted_sums
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
    is_int8 = source.name in low.int8
    is_dot = n <= _DOTS and k >= LANES and not is_int8
    make, kind = (by_rows, "rows") if is_dot else (by_columns, "columns")
    packed = low.block.add(f"{source.name} {kind} {part}", lambda c: make(c[source][rows, cols]))
    bias_view = None
    if bias is not None:
        if not isinstance(low.values[bias], Const):
            raise NotImplementedError("a bias that is computed")
        cut = slice(*columns)
        bias_buffer = low.block.add(f"{bias.name} bias {columns}", lambda c: padded_bias(c[bias].flatten()[cut]))
        bias_view = whole(bias_buffer, (bias_buffer.size,))
    width = n if is_dot else -(-n // LANES) * LANES
    dst = View(low.buffer(m * width), 0, (m, n), (width, 1))
    row, group = (-(-k // LANES) * LANES, 0) if is_dot else (0, k * GROUP * LANES)
    if is_int8:
        product = int8_product(low, node, source, (rows, cols), x, dst, (n, k), bias_view)
        low.body.statements.append(product)
        low.layers.append((source.name, product))
        return dst
    w, parts = whole(packed, (packed.size,)), partial_sums(n, k)
    product = Product(dst, x, w, n, k, row, group, parts, bias_view, is_dot, note=note_of(node))
    low.body.statements.append(product)
    low.layers.append((source.name, product))
    return dst


def int8_product(
    low: Lowering,
    node: Any,
    source: Node,
    part: tuple[slice, slice],
    x: View,
    dst: View,
    sizes: tuple[int, int],
    bias: View | None,
) -> Product:
    """The same with weights and activations of 8 bits."""
    n, k = sizes
    name = f"{source.name} int8 {part}"
    weights = low.block.add(f"{name} numbers", lambda c: by_quads(rounded(c[source][part])[0]))
    scales = low.block.add(f"{name} steps", lambda c: padded_bias(rounded(c[source][part])[1]))
    sums = low.block.add(f"{name} sums", lambda c: shifted_sums(rounded(c[source][part])[0]))
    w, s, t = (whole(b, (b.size,)) for b in (weights, scales, sums))
    return Product(dst, x, w, n, k, 0, 0, 1, bias, scales=s, sums=t, note=note_of(node))


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
