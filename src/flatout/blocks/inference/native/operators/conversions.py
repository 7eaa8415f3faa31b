"""Copies, and conversions from one dtype to another."""

from __future__ import annotations

from typing import Final

from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, aten, native_dtype_name
from flatout.blocks.inference.native.operator_table import NativeOperator, by_element, pointwise_argument, same_box
from flatout.blocks.inference.native.values import Lazy, Value, cast


def _copy(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    return low.input_part(node, box)


def _conversion(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    dtype = native_dtype_name(node.meta["val"].dtype)
    x = pointwise_argument(low, node.args[0], box, shape)
    assert x is not None
    return Lazy(cast(x, dtype), shape, dtype)


_COPY: Final = NativeOperator(lower=_copy, inputs=same_box)
_CONVERSION: Final = NativeOperator(lower=_conversion, inputs=by_element)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.clone.default: _COPY,
    aten.alias.default: _COPY,
    aten.lift_fresh_copy: _CONVERSION,
    aten.detach: _CONVERSION,
    aten.contiguous: _CONVERSION,
    aten._to_copy: _CONVERSION,
    aten.to: _CONVERSION,
    aten.positive: _CONVERSION,
    aten.dropout: _CONVERSION,
}
