"""Layer norm, group norm, batch norm with the running statistics, softmax and its logarithm."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any, Final

from torch import Tensor

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, aten, note_of, positive_dim, shape_of
from flatout.blocks.inference.native.operator_table import NativeOperator, same_box
from flatout.blocks.inference.native.packing import Constants
from flatout.blocks.inference.native.statements import RowKind, RowWise
from flatout.blocks.inference.native.values import (
    CExpression,
    Const,
    Lazy,
    Value,
    View,
    broadcast_view,
    mapped_views,
    permuted_view,
    sliced_view,
    whole,
)


def _layer_norm(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    _, sizes, weight, bias, eps = node.args
    width = prod(sizes)
    src = low.rows_of(low.input_part(node, box), width)
    rows = [low.rows_of(low.numbers(s), width) if s is not None else None for s in (weight, bias)]
    dst = whole(low.buffer(prod(shape)), (src.shape[0], width))
    sides = [View(s.buffer, s.offset, (width,), (1,)) if s is not None else None for s in rows]
    low.body.statements.append(RowWise("layer_norm", dst, src, float(eps), sides[0], sides[1], note_of(node)))
    return low.reshaped(dst, shape)


def _layer_norm_dims(node: Any) -> set[int]:
    rank = len(shape_of(node))
    return set(range(rank - len(node.args[1]), rank))


def _batch_norm(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """Scale and shift follow from the running statistics, so they are constants."""
    args: Any = node.args
    source, weight, bias, mean, var, eps = args[0], args[1], args[2], args[3], args[4], args[6]
    if not all(s is None or isinstance(low.values[s], Const) for s in (weight, bias, mean, var)):
        raise NotImplementedError("a batch norm whose statistics change")

    def folded(c: Constants) -> tuple[Tensor, Tensor]:
        scale = (c[var].double() + eps).rsqrt() * (c[weight].double() if weight is not None else 1.0)
        shift = (c[bias].double() if bias is not None else 0.0) - c[mean].double() * scale
        return scale.float(), shift.float()

    def by_channel(which: int) -> View:
        buffer = low.block.add(f"{node.name} {which}", lambda c: folded(c)[which])
        ones = (1,) * (len(shape) - 2)
        view = View(buffer, 0, (1, shape_of(source)[1], *ones), (0, 1, *(0 for _ in ones)))
        return broadcast_view(sliced_view(view, 1, *box[1]), shape)

    x = low.expression(source, box, shape)
    scaled = CExpression("__builtin_fmaf({0}, {1}, {2})", (x, by_channel(0), by_channel(1)), "float32")
    return Lazy(scaled, shape, "float32")


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, inner: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A layer norm of each group, then each channel's scale and shift."""
    width = c // groups * inner
    rows = aten.view.default(x.contiguous(), [n * groups, width])
    normed, mean, rstd = aten.native_layer_norm.default(rows, [width], None, None, eps)
    y = aten.view.default(normed, list(x.shape))
    sides = [1, c, *[1] * (x.dim() - 2)]
    if weight is not None:
        y = aten.mul.Tensor(y, aten.view.default(weight, sides))
    if bias is not None:
        y = aten.add.Tensor(y, aten.view.default(bias, sides))
    return y, aten.view.default(mean, [n, groups]), aten.view.default(rstd, [n, groups])


_KINDS: Final[dict[object, RowKind]] = {
    aten._softmax.default: "softmax",
    aten._safe_softmax.default: "safe_softmax",
    aten._log_softmax.default: "log_softmax",
}


def _softmax(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """Over one dimension, which is moved to the end."""
    dim = positive_dim(node, node.args[1])
    order = [d for d in range(len(shape)) if d != dim] + [dim]
    moved = mapped_views(low.input_part(node, box), lambda v: permuted_view(v, order))
    src = low.rows_of(moved, shape[dim])
    dst = whole(low.buffer(prod(shape)), (src.shape[0], shape[dim]))
    low.body.statements.append(RowWise(_KINDS[node.target], dst, src, note=note_of(node)))
    result = low.reshaped(dst, [shape[d] for d in order])
    return permuted_view(result, [order.index(d) for d in range(len(shape))])


def _softmax_dims(node: Any) -> set[int]:
    return {positive_dim(node, node.args[1])}


_SOFTMAX: Final = NativeOperator(lower=_softmax, inputs=same_box, complete_dims=_softmax_dims)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.native_layer_norm.default: NativeOperator(lower=_layer_norm, inputs=same_box, complete_dims=_layer_norm_dims),
    aten._native_batch_norm_legit_no_training.default: NativeOperator(lower=_batch_norm, inputs=same_box),
    aten._softmax.default: _SOFTMAX,
    aten._safe_softmax.default: replace(_SOFTMAX, replaces_decomposition=True),
    aten._log_softmax.default: _SOFTMAX,
}
DECOMPOSITIONS: Final = {aten.native_group_norm.default: _group_norm}
