"""Rows of a table by indices: embeddings, and an index tensor for one dimension."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, aten, note_of, positive_dim, shape_of
from flatout.blocks.inference.native.operator_table import NativeOperator
from flatout.blocks.inference.native.statements import Gather
from flatout.blocks.inference.native.values import (
    CExpression,
    Const,
    Lazy,
    Scalar,
    Value,
    View,
    boxed_view,
    mapped_views,
    permuted_view,
    whole,
)


def _embedding(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    table, index = node.args[0], node.args[1]
    if not isinstance(low.values[table], Const):
        raise NotImplementedError("an embedding whose table is computed")
    return _gathered(low, node, low.constant_view(table), low.view(index, box[:-1]), shape)


def _embedding_inputs(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    yield node.args[1], box[:-1]


def _embedding_complete_dims(node: Any) -> set[int]:
    return {len(shape_of(node)) - 1}


def _gathered(low: Lowering, node: Any, table: View, index: View, shape: tuple[int, ...]) -> View:
    if index.dtype not in ("int64", "int32"):
        raise NotImplementedError(f"an index of {index.dtype}")
    flat = low.reshaped(index, (prod(index.shape),))
    dst = whole(low.buffer(prod(shape), table.dtype), (flat.shape[0], table.shape[1]))
    low.body.statements.append(Gather(dst, table, flat, note_of(node)))
    return low.reshaped(dst, shape)


def _index(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if node.target == aten.index_select.default:
        dim, which = positive_dim(source, node.args[1]), node.args[2]
    else:
        dims = [d for d, i in enumerate(indices) if i is not None]
        if len(dims) != 1:
            raise NotImplementedError("an index of several tensors")
        dim, which = dims[0], indices[dims[0]]
    if which.meta["val"].dtype == torch.bool:
        raise NotImplementedError("an index by a mask, whose result has no fixed size")
    rank = len(shape_of(source))
    order = [dim, *(d for d in range(rank) if d != dim)]
    rest = tuple(shape_of(source)[d] for d in order[1:])
    moved = mapped_views(low.numbers(source), lambda v: permuted_view(v, order))
    table = low.rows_of(moved, prod(rest))
    index = _from_the_start(low, low.view(which), shape_of(source)[dim])
    found = _gathered(low, node, table, index, (*index.shape, *rest))
    wide = len(index.shape)
    back = [*range(wide, wide + dim), *range(wide), *range(wide + dim, wide + rank - 1)]
    return boxed_view(permuted_view(found, back), box)


def _from_the_start(low: Lowering, index: View, length: int) -> View:
    """Indices below 0 count from the end."""
    expr = CExpression("({0} + {1} * ({0} < 0))", (index, Scalar(length)), index.dtype)
    return low.materialised(Lazy(expr, index.shape, index.dtype))


def _flip(x: Tensor, dims: list[int]) -> Tensor:
    for dim in dims:
        back = torch.arange(x.shape[dim] - 1, -1, -1, device=x.device)
        x = aten.index_select.default(x, dim, back)
    return x


_INDEX: Final = NativeOperator(lower=_index)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.embedding.default: NativeOperator(
        lower=_embedding, inputs=_embedding_inputs, complete_dims=_embedding_complete_dims
    ),
    aten.index.Tensor: _INDEX,
    aten.index_select.default: _INDEX,
}
DECOMPOSITIONS: Final = {aten.flip.default: _flip}
