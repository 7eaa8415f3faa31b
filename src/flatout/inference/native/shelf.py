"""What each operator becomes that is not element-wise."""

from __future__ import annotations

import operator
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from flatout.inference.native import convolution, demand, pointwise, products
from flatout.inference.native.demand import Box, Span, aten, shape_of
from flatout.inference.native.lowering import Lowering
from flatout.inference.native.packing import Constants
from flatout.inference.native.places import dtype_name, note_of
from flatout.inference.native.statements import Gather, Map, RowKind, RowWise
from flatout.inference.native.values import (
    Call,
    Const,
    Lazy,
    Scalar,
    Value,
    View,
    broadcast,
    leaves,
    mapped,
    num_operations,
    permuted,
    reshaped,
    sliced,
    whole,
    with_one,
    without,
)


def _permute(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    dims = [d % len(box) for d in node.args[1]]
    return mapped(low.seen(node, box), lambda v: permuted(v, dims))


def _select(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    dim = demand.dim_of(node.args[0], node.args[1])
    return mapped(low.seen(node, box), lambda v: without(v, [dim]))


def _slice(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    dim, _, _, step = demand.slice_of(node)
    return mapped(low.seen(node, box), lambda v: sliced(v, dim, 0, v.shape[dim], step))


def _unsqueeze(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    dim = node.args[1] % len(box)
    return mapped(low.seen(node, box), lambda v: with_one(v, dim))


def _squeeze(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    gone = demand.squeezed_dims(node)
    return mapped(low.seen(node, box), lambda v: without(v, list(gone)))


def _expand(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    value = low.seen(node, box)
    if isinstance(value, Lazy) and num_operations(value.expr) and prod(value.shape) < prod(shape):
        value = low.materialised(value)
    return mapped(value, lambda v: broadcast(v, shape))


def _view(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    value = low.seen(node, box)
    views = list(leaves(value.expr)) if isinstance(value, Lazy) else [value]
    if any(reshaped(v, shape) is None for v in views):
        value = low.materialised(value)
    if isinstance(value, Lazy) and not views:
        return value._replace(shape=shape)
    if isinstance(value, Lazy):
        changed = mapped(value, lambda v: reshaped(v, shape) or v)
        return changed._replace(shape=shape)
    seen = reshaped(value, shape)
    assert seen is not None
    return seen


def _getitem(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source: Any = node.args[0]
    if source.target not in demand.SPLITS and node.args[1] != 0:
        raise NotImplementedError(f"the {node.args[1]}th result of {source.target}")
    return low.seen(node, box)


def _same(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    return low.seen(node, box)


def _cat(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    parts: Any = node.args[0]
    dim = demand.dim_of(node, node.args[1] if len(node.args) > 1 else 0)
    found = list(demand.cat_parts(parts, dim, box[dim]))
    pieces = [(s, (*box[:dim], Span(a.start - start, a.stop - start), *box[dim + 1 :])) for s, a, start in found]
    if len(pieces) == 1:
        return low.view(*pieces[0]) if isinstance(low.part(*pieces[0]), Const) else low.part(*pieces[0])
    dtype = dtype_name(node.meta["val"].dtype)
    dst, at = low.wanted.get(node) or whole(low.buffer(prod(shape), dtype), shape), 0
    if dst.shape != shape:
        dst = whole(low.buffer(prod(shape), dtype), shape)
    for source, part in pieces:
        length = part[dim].stop - part[dim].start
        into = sliced(dst, dim, at, at + length)
        expr = pointwise.cast(low.expression(source, part, into.shape), dtype)
        low.body.statements.append(Map(into, expr, note_of(node)))
        at += length
    return dst


_SOFTMAX: Final[dict[object, RowKind]] = {
    aten._softmax.default: "softmax",
    aten._safe_softmax.default: "safe_softmax",
    aten._log_softmax.default: "log_softmax",
}


def _softmax(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source, dim = node.args[0], demand.dim_of(node, node.args[1])
    value = low.viewed(low.seen(node, box), source, box)
    last = [d for d in range(len(shape)) if d != dim] + [dim]
    moved = mapped(value, lambda v: permuted(v, last))
    src = low.rows_of(moved, source, None, shape[dim])
    dst = whole(low.buffer(prod(shape)), (src.shape[0], shape[dim]))
    low.body.statements.append(RowWise(_SOFTMAX[node.target], dst, src, note=note_of(node)))
    seen = reshaped(dst, tuple(shape[d] for d in last))
    assert seen is not None
    return permuted(seen, [last.index(d) for d in range(len(shape))])


def _layer_norm(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source, sizes, weight, bias, eps = node.args
    width = prod(sizes)
    value = low.viewed(low.seen(node, box), source, box)
    src = low.rows_of(value, source, None, width)
    sides = [low.rows_of(low.part(s), s, None, width) if s is not None else None for s in (weight, bias)]
    dst = whole(low.buffer(prod(shape)), (src.shape[0], width))
    sides = [View(s.buffer, s.offset, (width,), (1,)) if s is not None else None for s in sides]
    low.body.statements.append(RowWise("layer_norm", dst, src, float(eps), sides[0], sides[1], note_of(node)))
    seen = reshaped(dst, shape)
    assert seen is not None
    return seen


_REDUCED: Final[dict[str, RowKind]] = {
    "sum": "sum",
    "mean": "mean",
    "amax": "max",
    "amin": "min",
    "var": "var",
    "prod": "prod",
    "any": "any",
    "all": "all",
    "argmax": "argmax",
    "argmin": "argmin",
    "max": "max",
    "min": "min",
}


def _reduce(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """Over any dimensions: they go last, and rows are reduced."""
    source: Any = node.args[0]
    rank = len(shape_of(source))
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    listed = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else list(given)
    over = sorted(d % rank for d in listed)
    kind = _REDUCED[pointwise.name_of(node.target)]
    stay = [d for d in range(rank) if d not in over]
    value = low.viewed(low.part(source), source, demand.full(source))
    want = "bool" if kind in ("any", "all") else "float32"
    if value.dtype != want:
        if value.dtype not in ("bool", "float32") or kind in ("any", "all"):
            raise NotImplementedError(f"{node.target} of {value.dtype}")
        value = Lazy(pointwise.cast(value.expr if isinstance(value, Lazy) else value, want), value.shape, want)
    width = prod(shape_of(source)[d] for d in over)
    src = low.rows_of(mapped(value, lambda v: permuted(v, stay + over)), source, None, width)
    dtype = dtype_name(node.meta["val"].dtype)
    if dtype != {"any": "bool", "all": "bool", "argmax": "int64", "argmin": "int64"}.get(kind, "float32"):
        raise NotImplementedError(f"{node.target} that gives {dtype}")
    dst = whole(low.buffer(src.shape[0], dtype), (src.shape[0],))
    correction = node.kwargs.get("correction", 1)
    low.body.statements.append(
        RowWise(kind, dst, src, float(1 if correction is None else correction), note=note_of(node))
    )
    seen = reshaped(dst, shape_of(node))
    assert seen is not None
    for dim, span in enumerate(box):
        seen = sliced(seen, dim, *span)
    return seen


def _embedding(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    table, index = node.args[0], node.args[1]
    if not isinstance(low.values[table], Const):
        raise NotImplementedError("an embedding whose table is computed")
    return _gathered(low, node, low.constant_view(table), low.view(index, box[:-1]), shape)


def _gathered(low: Lowering, node: Any, table: View, index: View, shape: tuple[int, ...]) -> View:
    if index.dtype not in ("int64", "int32"):
        raise NotImplementedError(f"an index of {index.dtype}")
    flat = reshaped(index, (prod(index.shape),)) or reshaped(low.materialised(index), (prod(index.shape),))
    assert flat is not None
    dst = whole(low.buffer(prod(shape), table.dtype), (flat.shape[0], table.shape[1]))
    low.body.statements.append(Gather(dst, table, flat, note_of(node)))
    seen = reshaped(dst, shape)
    assert seen is not None
    return seen


def _index(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """One index tensor, for one dimension."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if node.target == aten.index_select.default:
        dim, which = demand.dim_of(source, node.args[1]), node.args[2]
    else:
        dims = [d for d, i in enumerate(indices) if i is not None]
        if len(dims) != 1:
            raise NotImplementedError("an index of several tensors")
        dim, which = dims[0], indices[dims[0]]
    if which.meta["val"].dtype == torch.bool:
        raise NotImplementedError("an index by a mask, whose result has no fixed size")
    rank = len(shape_of(source))
    value = low.viewed(low.part(source), source, demand.full(source))
    order = [dim, *(d for d in range(rank) if d != dim)]
    rest = tuple(shape_of(source)[d] for d in order[1:])
    moved = mapped(value, lambda v: permuted(v, order))
    table = low.rows_of(moved, source, None, prod(rest))
    index = _from_the_start(low, low.view(which), shape_of(source)[dim])
    found = _gathered(low, node, table, index, (*index.shape, *rest))
    wide = len(index.shape)
    back = [*range(wide, wide + dim), *range(wide), *range(wide + dim, wide + rank - 1)]
    seen = permuted(found, back)
    for d, span in enumerate(box):
        seen = sliced(seen, d, *span)
    return seen


def _from_the_start(low: Lowering, index: View, length: int) -> View:
    """Indices below 0 count from the end."""
    expr = Call("({0} + {1} * ({0} < 0))", (index, Scalar(length)), index.dtype)
    return low.materialised(Lazy(expr, index.shape, index.dtype))


def _convolution(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    return convolution.lowered(low, node, box)


def _batch_norm(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """With the running statistics: scale and shift are constants."""
    args: Any = node.args
    source, weight, bias, mean, var, eps = args[0], args[1], args[2], args[3], args[4], args[6]
    if not all(s is None or isinstance(low.values[s], Const) for s in (weight, bias, mean, var)):
        raise NotImplementedError("a batch norm whose statistics change")

    def folded(c: Constants) -> tuple[Tensor, Tensor]:
        scale = (c[var].double() + eps).rsqrt() * (c[weight].double() if weight is not None else 1.0)
        shift = (c[bias].double() if bias is not None else 0.0) - c[mean].double() * scale
        return scale.float(), shift.float()

    def made(which: int) -> View:
        buffer = low.block.add(f"{node.name} {which}", lambda c: folded(c)[which])
        ones = (1,) * (len(shape) - 2)
        view = View(buffer, 0, (1, shape_of(source)[1], *ones), (0, 1, *(0 for _ in ones)))
        return broadcast(sliced(view, 1, *box[1]), shape)

    x = low.expression(source, box, shape)
    scaled = Call("__builtin_fmaf({0}, {1}, {2})", (x, made(0), made(1)), "float32")
    return Lazy(scaled, shape, "float32")


def _constant_pad(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    source, pads = node.args[0], list(node.args[1])
    value = node.args[2] if len(node.args) > 2 else 0.0
    if min(pads) < 0:
        raise NotImplementedError("padding by less than nothing")
    outer = shape_of(node)
    dst = whole(low.buffer(prod(outer), dtype_name(node.meta["val"].dtype)), outer)
    low.body.statements.append(Map(dst, Scalar(float(value)), note_of(node)))
    inner = dst
    for i, dim in zip(range(0, len(pads), 2), reversed(range(len(outer))), strict=False):
        inner = sliced(inner, dim, pads[i], outer[dim] - pads[i + 1])
    low.body.statements.append(Map(inner, low.expression(source, None, inner.shape), note_of(node)))
    for dim, span in enumerate(box):
        dst = sliced(dst, dim, *span)
    return dst


SHELF: dict[object, Any] = {
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.expand.default: _expand,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.split_with_sizes.default: _same,
    aten.split.Tensor: _same,
    aten.clone.default: _same,
    aten.alias.default: _same,
    operator.getitem: _getitem,
    aten.cat.default: _cat,
    aten.mm.default: products.linear,
    aten.addmm.default: products.linear,
    aten.bmm.default: products.bmm,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten.native_layer_norm.default: _layer_norm,
    aten.sum.dim_IntList: _reduce,
    aten.sum.default: _reduce,
    aten.mean.dim: _reduce,
    aten.mean.default: _reduce,
    aten.amax.default: _reduce,
    aten.amin.default: _reduce,
    aten.max.default: _reduce,
    aten.min.default: _reduce,
    aten.var.correction: _reduce,
    aten.any.dim: _reduce,
    aten.any.dims: _reduce,
    aten.all.dim: _reduce,
    aten.prod.dim_int: _reduce,
    aten.argmax.default: _reduce,
    aten.argmin.default: _reduce,
    aten.embedding.default: _embedding,
    aten.index.Tensor: _index,
    aten.index_select.default: _index,
    aten.convolution.default: _convolution,
    aten._native_batch_norm_legit_no_training.default: _batch_norm,
    aten.constant_pad_nd.default: _constant_pad,
}
