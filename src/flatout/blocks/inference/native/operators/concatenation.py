"""Concatenation, and padding with a constant: parts of a result that are computed one by one."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import (
    Box,
    IndexRange,
    aten,
    native_dtype_name,
    note_of,
    positive_dim,
    shape_of,
)
from flatout.blocks.inference.native.operator_table import NativeOperator
from flatout.blocks.inference.native.statements import Map
from flatout.blocks.inference.native.values import Scalar, Value, boxed_view, cast, sliced_view, whole


def _parts(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    """The inputs that a part of the result contains, and the part of each."""
    dim, start = _dim(node), 0
    for source in node.args[0]:
        shape = shape_of(source)
        if len(shape) <= dim:  # torch lets empty tensors of one dimension join anything
            continue
        inside = IndexRange(max(0, box[dim].start - start), min(shape[dim], box[dim].stop - start))
        if inside.start < inside.stop:
            yield source, (*box[:dim], inside, *box[dim + 1 :])
        start += shape[dim]


def _dim(node: Any) -> int:
    return positive_dim(node, node.args[1] if len(node.args) > 1 else 0)


def _cat(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    dim = _dim(node)
    pieces = list(_parts(node, box))
    if len(pieces) == 1:
        return low.numbers(*pieces[0])
    dtype = native_dtype_name(node.meta["val"].dtype)
    dst, at = low.wanted.get(node) or whole(low.buffer(prod(shape), dtype), shape), 0
    if dst.shape != shape:
        dst = whole(low.buffer(prod(shape), dtype), shape)
    for source, part in pieces:
        length = part[dim].stop - part[dim].start
        into = sliced_view(dst, dim, at, at + length)
        expr = cast(low.expression(source, part, into.shape), dtype)
        low.body.statements.append(Map(into, expr, note_of(node)))
        at += length
    return dst


def _constant_pad(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source, pads = node.args[0], list(node.args[1])
    value = node.args[2] if len(node.args) > 2 else 0.0
    if min(pads) < 0:
        raise NotImplementedError("padding by less than nothing")
    outer = shape_of(node)
    dst = whole(low.buffer(prod(outer), native_dtype_name(node.meta["val"].dtype)), outer)
    low.body.statements.append(Map(dst, Scalar(float(value)), note_of(node)))
    inner = dst
    for i, dim in zip(range(0, len(pads), 2), reversed(range(len(outer))), strict=False):
        inner = sliced_view(inner, dim, pads[i], outer[dim] - pads[i + 1])
    low.body.statements.append(Map(inner, low.expression(source, None, inner.shape), note_of(node)))
    return boxed_view(dst, box)


OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.cat.default: NativeOperator(lower=_cat, inputs=_parts),
    aten.constant_pad_nd.default: NativeOperator(lower=_constant_pad),
}
