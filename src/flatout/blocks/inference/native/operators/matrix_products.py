"""Products of matrices: rows with a constant, which is packed, or with another computed matrix."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, IndexRange, aten, broadcast_box, note_of, shape_of
from flatout.blocks.inference.native.operator_table import NativeOperator
from flatout.blocks.inference.native.packing import GROUP, padded_bias
from flatout.blocks.inference.native.products import WeightMatrix, multiply_by_weight, partial_sums
from flatout.blocks.inference.native.statements import Map, MatrixProduct
from flatout.blocks.inference.native.values import (
    LANES,
    CExpression,
    Const,
    Lazy,
    Scalar,
    Value,
    View,
    cast,
    sliced_view,
    view_without,
    whole,
)

_MAX_DOT_OUTPUTS: Final = 4
"""Products with no more outputs sum along the depth: a block of 16 columns would be mostly zeros."""


def _inputs(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    args: Any = node.args
    bias, a, b = args if node.target == aten.addmm.default else (None, *args)
    if bias is not None:
        yield bias, broadcast_box(bias, box)
    depth = IndexRange(0, shape_of(a)[-1])
    yield a, (*box[:-1], depth)
    yield b, (*box[:-2], depth, box[-1])


def _linear(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """One product of matrices: of rows with a constant, or of two that are computed."""
    args: Any = node.args
    bias, a, b = args if node.target == aten.addmm.default else (None, *args)
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("addmm with alpha or beta")
    if bias is not None and (shape_of(bias)[-1:] != shape_of(node)[-1:] or (len(shape_of(bias)) > 1 and shape[0] > 1)):
        raise NotImplementedError(f"addmm that adds a tensor of shape {shape_of(bias)}")
    depth = IndexRange(0, shape_of(a)[1])
    x = low.rows_of(low.numbers(a, (box[0], depth)), depth.stop)
    if isinstance(low.part(b, (depth, box[1])), Const):
        return _weight_product(low, node, x, b, bias, box[1])
    columns = _columns(low, low.numbers(b, (depth, box[1])))
    product = _rows_of_blocks(low, shape)
    _multiply(low, node, product, x, columns)
    if bias is None:
        return product
    added = low.expression(bias, broadcast_box(bias, box), shape)
    sum_of_both = CExpression("({0} + {1})", (product, cast(added, "float32")), "float32")
    return low.materialised(Lazy(sum_of_both, shape, "float32"))


def _weight_product(low: Lowering, node: Any, x: View, source: Node, bias: Any, columns: IndexRange) -> View:
    """Rows (m, k) times columns of a weight (k, all)."""
    (m, k), n = x.shape, columns.stop - columns.start
    cut, bias_view = slice(*columns), None
    if bias is not None:
        if not isinstance(low.values[bias], Const):
            raise NotImplementedError("a bias that is computed")
        bias_buffer = low.block.add(f"{bias.name} bias {columns}", lambda c: padded_bias(c[bias].flatten()[cut]))
        bias_view = whole(bias_buffer, (bias_buffer.size,))
    weight = WeightMatrix(source, str((IndexRange(0, k), columns)), lambda c: c[source][:, cut])
    is_dot = n <= _MAX_DOT_OUTPUTS and k >= LANES and source.name not in low.int8
    dst = whole(low.buffer(m * n), (m, n)) if is_dot else _rows_of_blocks(low, (m, n))
    multiply_by_weight(low, node, weight, x, dst, bias_view, is_dot=is_dot)
    return dst


def _bmm(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    a, b = node.args
    depth = IndexRange(0, shape_of(a)[2])
    left = low.numbers(a, (*box[:2], depth))
    if not isinstance(left, View) or left.strides[2] != 1:
        left = low.materialised(left)
    right = _columns(low, low.numbers(b, (box[0], depth, box[2])))
    dst = _rows_of_blocks(low, shape)
    for i in range(shape[0]):
        into, rows, columns = (view_without(sliced_view(v, 0, i, i + 1), [0]) for v in (dst, left, right))
        _multiply(low, node, into, rows, columns)
    return dst


def _rows_of_blocks(low: Lowering, shape: tuple[int, ...]) -> View:
    """New memory whose rows are whole blocks of 16."""
    width = -(-shape[-1] // LANES) * LANES
    wide = whole(low.buffer(prod(shape[:-1]) * width), (*shape[:-1], width))
    return sliced_view(wide, len(shape) - 1, 0, shape[-1])


def _columns(low: Lowering, value: View | Lazy) -> View:
    """The right side of a product (..., k, n), where the last block of a row can be read whole."""
    n = value.shape[-1]
    if isinstance(value, View) and value.strides[-1] == 1 and not n % LANES and value.buffer.kind != "ring":
        return value
    dst = _rows_of_blocks(low, value.shape)
    if n % LANES:  # what the last block reads beyond must be numbers
        width = dst.strides[-2]
        beyond = View(dst.buffer, n, (prod(value.shape[:-1]), width - n), (width, 1))
        low.body.statements.append(Map(beyond, Scalar(0.0), "padding"))
    return low.materialised(value, dst)


def _multiply(low: Lowering, node: Any, dst: View, x: View, w: View) -> None:
    """Compute dst (m, n) = x (m, k) times w (k, n), which is computed, too."""
    k, n = w.shape
    product = MatrixProduct(dst, x, w, n, k, w.strides[0], GROUP * LANES, partial_sums(n, k), note=note_of(node))
    low.body.statements.append(product)


_LINEAR: Final = NativeOperator(lower=_linear, inputs=_inputs)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.mm.default: _LINEAR,
    aten.addmm.default: _LINEAR,
    aten.bmm.default: NativeOperator(lower=_bmm, inputs=_inputs),
}
