"""Views: the same numbers, with other dimensions or as copies, which cost nothing."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

from torch import Tensor
from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import SPLITS, Box, IndexRange, aten, positive_dim, shape_of, slice_of
from flatout.blocks.inference.native.operator_table import InputRule, NativeOperator, by_element, same_box
from flatout.blocks.inference.native.values import (
    Lazy,
    Value,
    View,
    broadcast_view,
    leaves,
    mapped_views,
    num_operations,
    permuted_view,
    reshaped_view,
    sliced_view,
    view_without,
    with_one,
)

Parts = Iterator[tuple[Node, Box]]


def _of_views(change: Callable[[Any, View], View], inputs: InputRule) -> NativeOperator:
    """An operator that shows the part of its input that `inputs` tells of another way."""

    def lower(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
        return mapped_views(low.input_part(node, box), lambda view: change(node, view))

    return NativeOperator(lower=lower, inputs=inputs)


def _permute_inputs(node: Any, box: Box) -> Parts:
    source, dims = node.args[0], node.args[1]
    rank = len(box)
    at = {d % rank: part for d, part in zip(dims, box, strict=True)}
    yield source, tuple(at[d] for d in range(rank))


def _select_inputs(node: Any, box: Box) -> Parts:
    source: Any = node.args[0]
    dim, index = positive_dim(source, node.args[1]), node.args[2]
    index = index + shape_of(source)[dim] if index < 0 else index
    yield source, (*box[:dim], IndexRange(index, index + 1), *box[dim:])


def _stepped(node: Any, view: View) -> View:
    dim, _, _, step = slice_of(node)
    return sliced_view(view, dim, 0, view.shape[dim], step)


def _slice_inputs(node: Any, box: Box) -> Parts:
    dim, start, _, step = slice_of(node)
    part = box[dim]
    new = IndexRange(start + part.start * step, start + (part.stop - 1) * step + 1)
    yield node.args[0], (*box[:dim], new, *box[dim + 1 :])


def _unsqueeze_inputs(node: Any, box: Box) -> Parts:
    dim = node.args[1] % len(box)
    yield node.args[0], (*box[:dim], *box[dim + 1 :])


def _squeeze_inputs(node: Any, box: Box) -> Parts:
    removed = _squeezed_dims(node)
    rest = iter(box)
    yield (
        node.args[0],
        tuple(IndexRange(0, 1) if d in removed else next(rest) for d in range(len(shape_of(node.args[0])))),
    )


def _squeezed_dims(node: Any) -> set[int]:
    source: Any = node.args[0]
    shape, dims = shape_of(source), node.args[1] if len(node.args) > 1 else range(len(shape_of(source)))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return {positive_dim(source, d) for d in listed if shape[d] == 1}


def _expand(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    value = low.input_part(node, box)
    if isinstance(value, Lazy) and num_operations(value.expr) and prod(value.shape) < prod(shape):
        value = low.materialised(value)
    return mapped_views(value, lambda v: broadcast_view(v, shape))


def _view(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    value = low.input_part(node, box)
    views = list(leaves(value.expr)) if isinstance(value, Lazy) else [value]
    if any(reshaped_view(v, shape) is None for v in views):
        value = low.materialised(value)
    changed = mapped_views(value, lambda v: reshaped_view(v, shape) or v)
    return changed._replace(shape=shape)


def _view_inputs(node: Any, box: Box) -> Parts:
    """Parts pass through dimensions that a reshape preserves."""
    source: Any = node.args[0]
    old, new = shape_of(source), shape_of(node)
    part = [IndexRange(0, n) for n in old]
    for olds, news in _groups(old, new):
        if _is_preserved(olds, news, node):
            wide = next(d for d in news if new[d] != 1)
            part[next(d for d in olds if old[d] != 1)] = box[wide]
    yield source, tuple(part)


def _view_complete_dims(node: Any) -> set[int]:
    runs = _groups(shape_of(node.args[0]), shape_of(node))
    return {d for olds, news in runs if not _is_preserved(olds, news, node) for d in news}


def _is_preserved(olds: list[int], news: list[int], node: Any) -> bool:
    """Whether a run of a view's dimensions is one dimension before and after, besides those of one element."""
    old, new = shape_of(node.args[0]), shape_of(node)
    return sum(old[d] != 1 for d in olds) == 1 == sum(new[d] != 1 for d in news)


def _groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions of both shapes that contain the same numbers.

    >>> list(_groups((2, 12), (2, 3, 4)))
    [([0], [0]), ([1], [1, 2])]
    """
    i = j = 0
    while i < len(old) or j < len(new):
        olds, news, a, b = [], [], 1, 1
        if i < len(old):
            olds, a, i = [i], old[i], i + 1
        if j < len(new):
            news, b, j = [j], new[j], j + 1
        while a != b:
            if a < b and i < len(old):
                olds.append(i)
                a *= old[i]
                i += 1
            elif j < len(new):
                news.append(j)
                b *= new[j]
                j += 1
            else:
                break
        yield olds, news


def _item(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source: Any = node.args[0]
    if source.target not in SPLITS and node.args[1] != 0:
        raise NotImplementedError(f"the {node.args[1]}th result of {source.target}")
    return low.input_part(node, box)


def _item_inputs(node: Any, box: Box) -> Parts:
    source: Any = node.args[0]
    if source.target in SPLITS:
        dim = positive_dim(source.args[0], source.args[2] if len(source.args) > 2 else 0)
        start = sum(value.shape[dim] for value in source.meta["val"][: node.args[1]])
        part = box[dim]
        box = (*box[:dim], IndexRange(part.start + start, part.stop + start), *box[dim + 1 :])
    yield source, box


def _repeat(x: Tensor, repeats: list[int]) -> Tensor:
    sizes = [1] * (len(repeats) - x.dim()) + list(x.shape)
    separated = [n for size in sizes for n in (1, size)]
    repeated = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
    y = aten.clone.default(aten.expand.default(aten.view.default(x.contiguous(), separated), repeated))
    result: Tensor = aten.view.default(y, [a * b for a, b in zip(repeats, sizes, strict=True)])
    return result


_VIEW: Final = NativeOperator(lower=_view, inputs=_view_inputs, complete_dims=_view_complete_dims)
_SQUEEZE: Final = _of_views(lambda node, view: view_without(view, list(_squeezed_dims(node))), _squeeze_inputs)
_SAME: Final = _of_views(lambda node, view: view, same_box)
OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.permute.default: _of_views(
        lambda node, view: permuted_view(view, [d % len(node.args[1]) for d in node.args[1]]), _permute_inputs
    ),
    aten.select.int: _of_views(
        lambda node, view: view_without(view, [positive_dim(node.args[0], node.args[1])]), _select_inputs
    ),
    aten.slice.Tensor: _of_views(_stepped, _slice_inputs),
    aten.unsqueeze.default: _of_views(
        lambda node, view: with_one(view, node.args[1] % len(shape_of(node))), _unsqueeze_inputs
    ),
    aten.squeeze.dims: _SQUEEZE,
    aten.squeeze.dim: _SQUEEZE,
    aten.squeeze.default: _SQUEEZE,
    aten.expand.default: NativeOperator(lower=_expand, inputs=by_element),
    aten.view.default: _VIEW,
    aten._unsafe_view.default: _VIEW,
    aten.reshape.default: _VIEW,
    aten.split_with_sizes.default: _SAME,
    aten.split.Tensor: _SAME,
    aten.clone.default: _SAME,
    aten.alias.default: _SAME,
    operator.getitem: NativeOperator(lower=_item, inputs=_item_inputs),
}
DECOMPOSITIONS: Final = {aten.repeat.default: _repeat}
