"""Softmax and its logarithm over one dimension, which is moved to the end."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Final

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, aten, note_of, positive_dim
from flatout.blocks.inference.native.operator_table import NativeOperator, same_box
from flatout.blocks.inference.native.statements import RowKind, RowWise
from flatout.blocks.inference.native.values import Value, mapped_views, permuted_view, whole

_KINDS: Final[dict[object, RowKind]] = {
    aten._softmax.default: "softmax",
    aten._safe_softmax.default: "safe_softmax",
    aten._log_softmax.default: "log_softmax",
}


def _softmax(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    dim = positive_dim(node, node.args[1])
    order = [d for d in range(len(shape)) if d != dim] + [dim]
    moved = mapped_views(low.input_part(node, box), lambda v: permuted_view(v, order))
    src = low.rows_of(moved, shape[dim])
    dst = whole(low.buffer(prod(shape)), (src.shape[0], shape[dim]))
    low.body.statements.append(RowWise(_KINDS[node.target], dst, src, note=note_of(node)))
    result = low.reshaped(dst, [shape[d] for d in order])
    return permuted_view(result, [order.index(d) for d in range(len(shape))])


def _complete_dims(node: Any) -> set[int]:
    return {positive_dim(node, node.args[1])}


_SOFTMAX: Final = NativeOperator(lower=_softmax, inputs=same_box, complete_dims=_complete_dims)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten._softmax.default: _SOFTMAX,
    aten._safe_softmax.default: replace(_SOFTMAX, replaces_decomposition=True),
    aten._log_softmax.default: _SOFTMAX,
}
