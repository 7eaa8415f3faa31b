"""Which part of each node the outputs need: a box, a range for every dimension. What lies outside is never computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from flatout.inference.native.pointwise import is_pointwise

aten = torch.ops.aten


class Span(NamedTuple):
    """Elements start to stop - 1 of a dimension."""

    start: int
    stop: int


Box: TypeAlias = tuple[Span, ...]
Rule: TypeAlias = Callable[[Node, Box], Iterator[tuple[Node, Box]]]


def shape_of(node: Any) -> tuple[int, ...]:
    """Of a node that gives one tensor; of the first, where there are several (all of a split's, as its input lies)."""
    value = node.meta["val"]
    if node.target in SPLITS:
        return shape_of(node.args[0])
    return tuple(value[0].shape) if isinstance(value, (tuple, list)) else tuple(value.shape)


def full(node: Any) -> Box:
    """All of it."""
    return tuple(Span(0, n) for n in shape_of(node))


def dim_of(node: Any, dim: int) -> int:
    """Counted from the first."""
    rank = len(shape_of(node))
    return dim + rank if dim < 0 else dim


def inputs_of(node: Any, box: Box) -> dict[Node, Box]:
    """What a node reads to give the part `box` of itself."""
    rule = RULES.get(node.target) or (by_element if is_pointwise(node) else None)
    wanted: dict[Node, Box] = {}
    told = dict.fromkeys(node.all_input_nodes)
    for source, part in rule(node, box) if rule else ():
        wanted[source] = union(wanted[source], part) if source in wanted else part
    for source in told:
        if source not in wanted and node.target != aten.cat.default:  # what a cat does not touch is not needed
            wanted[source] = full(source)
    return wanted


def demands(nodes: list[Node], outputs: list[Node]) -> dict[Node, Box]:
    """The union of what all readers need, for each node that is needed at all."""
    needed: dict[Node, Box] = {node: full(node) for node in outputs}
    for node in reversed(nodes):
        if node not in needed or node.op != "call_function":
            continue
        needed[node] = _widened(node, needed[node])
        for source, box in inputs_of(node, needed[node]).items():
            needed[source] = union(needed[source], box) if source in needed else box
    return needed


def _widened(node: Any, box: Box) -> Box:
    """With all of the dimensions that code cannot give a part of: readers see their part of what it gives."""
    if node.target in (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default):
        dims = {dim_of(node, node.args[1])}
    elif node.target == aten.native_layer_norm.default:
        dims = set(range(len(box) - len(node.args[1]), len(box)))
    elif node.target == aten.embedding.default:
        dims = {len(box) - 1}
    elif node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        new = shape_of(node)
        dims = {d for olds, news in groups(shape_of(node.args[0]), new) if not _is_kept(olds, news, node) for d in news}
    else:
        return box
    return tuple(Span(0, n) if d in dims else span for d, (n, span) in enumerate(zip(shape_of(node), box, strict=True)))


def union(a: Box, b: Box) -> Box:
    """The smallest box around both."""
    return tuple(Span(min(x.start, y.start), max(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------------------------------------------------------- rules


def by_element(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    """Each element needs those that broadcast to it."""
    for source in node.all_input_nodes:
        shape = shape_of(source)
        if len(shape) > len(box):
            continue
        tail = box[len(box) - len(shape) :]
        yield source, tuple(Span(0, 1) if n == 1 else span for n, span in zip(shape, tail, strict=True))


def _permute(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    source, dims = node.args[0], node.args[1]
    rank = len(box)
    at = {d % rank: span for d, span in zip(dims, box, strict=True)}
    yield source, tuple(at[d] for d in range(rank))


def _select(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    source: Any = node.args[0]
    dim, index = dim_of(source, node.args[1]), node.args[2]
    index = index + shape_of(source)[dim] if index < 0 else index
    yield source, (*box[:dim], Span(index, index + 1), *box[dim:])


def slice_of(node: Any) -> tuple[int, int, int, int]:
    """Dimension, start, stop and step of a slice."""
    args: Any = [*node.args[1:], *[None] * 5]
    source: Any = node.args[0]
    dim = dim_of(source, args[0] or 0)
    length = shape_of(source)[dim]
    start, stop = (args[1] or 0), (length if args[2] is None else args[2])
    start = max(0, start + length if start < 0 else start)
    stop = min(length, stop + length if stop < 0 else stop)
    return dim, start, stop, args[3] or 1


def _slice(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    dim, start, _, step = slice_of(node)
    span = box[dim]
    new = Span(start + span.start * step, start + (span.stop - 1) * step + 1)
    yield node.args[0], (*box[:dim], new, *box[dim + 1 :])


def _unsqueeze(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    dim = node.args[1] % len(box)
    yield node.args[0], (*box[:dim], *box[dim + 1 :])


def _squeeze(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    gone = squeezed_dims(node)
    rest = iter(box)
    yield node.args[0], tuple(Span(0, 1) if d in gone else next(rest) for d in range(len(shape_of(node.args[0]))))


def squeezed_dims(node: Any) -> set[int]:
    """That a squeeze takes out."""
    source: Any = node.args[0]
    shape, dims = shape_of(source), node.args[1] if len(node.args) > 1 else range(len(shape_of(source)))
    listed = [dims] if isinstance(dims, int) else list(dims)
    return {dim_of(source, d) for d in listed if shape[d] == 1}


def _view(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    """Parts pass through dimensions that a reshape keeps."""
    source: Any = node.args[0]
    old, new = shape_of(source), shape_of(node)
    part = [Span(0, n) for n in old]
    for olds, news in groups(old, new):
        if _is_kept(olds, news, node):
            wide = next(d for d in news if new[d] != 1)
            part[next(d for d in olds if old[d] != 1)] = box[wide]
    yield source, tuple(part)


def _is_kept(olds: list[int], news: list[int], node: Any) -> bool:
    """Whether a run of a view's dimensions is one dimension before and after, besides those of one element."""
    old, new = shape_of(node.args[0]), shape_of(node)
    return sum(old[d] != 1 for d in olds) == 1 == sum(new[d] != 1 for d in news)


def groups(old: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions of both shapes that hold the same numbers.

    >>> list(groups((2, 12), (2, 3, 4)))
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


def _rows(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    """Rows of what is normalised over the last dimensions: softmax, layer norm, reductions that keep the dimension."""
    source: Any = node.args[0]
    if node.target in (aten._softmax.default, aten._safe_softmax.default, aten._log_softmax.default):
        over = {dim_of(source, node.args[1])}
    else:
        rank = len(shape_of(source))
        over = set(range(rank - len(node.args[1]), rank))
    yield source, tuple(Span(0, n) if d in over else box[d] for d, n in enumerate(shape_of(source)))


def _mm(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    args: Any = node.args
    if node.target == aten.addmm.default:
        bias, a, b = args
        yield from ((s, p) for s, p in by_element_of(bias, box))
    else:
        a, b = args
    depth = Span(0, shape_of(a)[-1])
    yield a, (*box[:-2], box[-2], depth)
    yield b, (*box[:-2], depth, box[-1])


def by_element_of(source: Node, box: Box) -> Iterator[tuple[Node, Box]]:
    """What of one source broadcasts to a box."""
    shape = shape_of(source)
    tail = box[len(box) - len(shape) :]
    yield source, tuple(Span(0, 1) if n == 1 else span for n, span in zip(shape, tail, strict=True))


def _cat(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    parts: Any = node.args[0]
    dim = dim_of(node, node.args[1] if len(node.args) > 1 else 0)
    for source, span, start in cat_parts(parts, dim, box[dim]):
        yield source, (*box[:dim], Span(span.start - start, span.stop - start), *box[dim + 1 :])


def cat_parts(parts: list[Node], dim: int, span: Span) -> Iterator[tuple[Node, Span, int]]:
    """The parts of a cat that a span touches: node, what of the whole, where the part begins."""
    start = 0
    for source in parts:
        shape = shape_of(source)
        if len(shape) <= dim:  # torch lets empty tensors of one dimension join anything
            continue
        stop = start + shape[dim]
        inside = Span(max(start, span.start), min(stop, span.stop))
        if inside.start < inside.stop:
            yield source, inside, start
        start = stop


def _getitem(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    source: Any = node.args[0]
    if source.target in SPLITS:
        dim, start, _ = split_of(source, node.args[1])
        span = box[dim]
        box = (*box[:dim], Span(span.start + start, span.stop + start), *box[dim + 1 :])
    yield source, box


def split_of(node: Any, index: int) -> tuple[int, int, int]:
    """Dimension, start and stop of one part of a split."""
    source: Any = node.args[0]
    dim = dim_of(source, node.args[2] if len(node.args) > 2 else 0)
    sizes = [v.shape[dim] for v in node.meta["val"]]
    return dim, sum(sizes[:index]), sum(sizes[: index + 1])


def window_of(span: Span, length: int, kernel: int, stride: int, pad: int, dilation: int) -> tuple[Span, int, int]:
    """What a stretch of a convolution's output reads of `length` numbers, and how many zeros come before and after."""
    start = span.start * stride - pad
    stop = (span.stop - 1) * stride - pad + (kernel - 1) * dilation + 1
    inside = Span(min(max(start, 0), length), max(min(stop, length), 0))
    if inside.start >= inside.stop:  # nothing but zeros: one number is taken all the same, and lies behind them
        return Span(0, 1), stop - start, 0
    return inside, max(0, -start), max(0, stop - length)


def _convolution(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    args: Any = node.args
    source, weight, _, stride, pad, dilation, transposed, *_ = args
    if transposed:
        return
    lengths, kernel = shape_of(source)[2:], shape_of(weight)[2:]
    spans = [window_of(*of)[0] for of in zip(box[2:], lengths, kernel, stride, pad, dilation, strict=True)]
    yield source, (box[0], Span(0, shape_of(source)[1]), *spans)


def _passed(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    yield node.args[0], box


def _embedding(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    yield node.args[1], box[:-1]


SPLITS: Final = (aten.split_with_sizes.default, aten.split.Tensor, aten.chunk.default)
RULES: dict[object, Rule] = {
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: by_element,
    aten.mm.default: _mm,
    aten.bmm.default: _mm,
    aten.addmm.default: _mm,
    aten.cat.default: _cat,
    aten.native_layer_norm.default: _rows,
    aten._softmax.default: _rows,
    aten._safe_softmax.default: _rows,
    aten._log_softmax.default: _rows,
    aten.split_with_sizes.default: _passed,
    aten.split.Tensor: _passed,
    aten.embedding.default: _embedding,
    aten.convolution.default: _convolution,
    aten._native_batch_norm_legit_no_training.default: _passed,
    aten.clone.default: _passed,
    aten.alias.default: _passed,
    operator.getitem: _getitem,
}


def add_rule(target: object, rule: Rule) -> None:
    """How the parts of one operator's inputs follow from a part of its output."""
    RULES[target] = rule
