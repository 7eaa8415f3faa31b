"""Convolutions as products: the windows of the input are a view through strides, or one copy of them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, Final

from torch import Tensor
from torch.fx import Node

from flatout.blocks.inference.native.lowering import Lowering
from flatout.blocks.inference.native.nodes import Box, IndexRange, aten, shape_of
from flatout.blocks.inference.native.operator_table import NativeOperator
from flatout.blocks.inference.native.packing import Constants, padded_bias
from flatout.blocks.inference.native.products import WeightMatrix, multiply_by_weight
from flatout.blocks.inference.native.statements import Map
from flatout.blocks.inference.native.values import (
    LANES,
    CExpression,
    Const,
    Lazy,
    Scalar,
    Value,
    View,
    boxed_view,
    broadcast_view,
    mapped_views,
    permuted_view,
    sliced_view,
    view_without,
    whole,
)

_MAX_TAPS: Final = 16
"""A depthwise kernel of no more is written out, a multiplication each."""


def _convolution(low: Lowering, node: Any, box: Box, shape: tuple[int, ...]) -> Value:
    """The part `box` of a convolution of any number of dimensions. Raises NotImplementedError for what is not supported."""
    args: Any = node.args
    source, weight, bias, stride, pad, dilation, transposed, _, groups = args
    if transposed:
        raise NotImplementedError("a transposed convolution")
    if not isinstance(low.values[weight], Const) or (bias is not None and not isinstance(low.values[bias], Const)):
        raise NotImplementedError("a convolution whose weights are computed")
    if box[1] != IndexRange(0, shape_of(node)[1]):
        box = (box[0], IndexRange(0, shape_of(node)[1]), *box[2:])  # all channels; what is too much is cut off below
    kernel = shape_of(weight)[2:]
    windows = _windows(low, source, box, kernel, (stride, pad, dilation))
    outer = tuple(s.stop - s.start for s in box[2:])
    channels, inner = shape_of(node)[1], shape_of(weight)[1]
    if inner == 1 and channels == groups and prod(kernel) <= _MAX_TAPS:
        outputs = _by_taps(low, node, windows, weight, bias, (channels, len(outer), prod(kernel)))
    else:
        outputs = _by_products(low, node, windows, weight, bias, (channels, inner, groups))
    wanted = low.boxes[node]
    return mapped_views(outputs, lambda v: sliced_view(v, 1, *wanted[1])) if wanted[1] != box[1] else outputs


def _windows(low: Lowering, source: Any, box: Box, kernel: tuple[int, ...], how: Any) -> View:
    """(batch, *out, *kernel, channels): what each output sees."""
    lengths = shape_of(source)[2:]
    parts = [_window_of(*of) for of in zip(box[2:], lengths, kernel, how[0], how[1], how[2], strict=True)]
    inside: Box = (box[0], IndexRange(0, shape_of(source)[1]), *(p[0] for p in parts))
    view = low.view(source, inside)
    if any(before or after for _, before, after in parts):
        view = _padded(low, view, [p[1:] for p in parts])
    rank, outer = len(kernel), [s.stop - s.start for s in box[2:]]
    shape = (view.shape[0], *outer, *kernel, view.shape[1])
    strides = (
        view.strides[0],
        *(view.strides[2 + d] * how[0][d] for d in range(rank)),
        *(view.strides[2 + d] * how[2][d] for d in range(rank)),
        view.strides[1],
    )
    return View(view.buffer, view.offset, shape, strides)


def _padded(low: Lowering, view: View, pads: list[tuple[int, int]]) -> View:
    """With zeros around, channels last."""
    sizes = [n + a + b for n, (a, b) in zip(view.shape[2:], pads, strict=True)]
    last = whole(low.buffer(view.shape[0] * prod(sizes) * view.shape[1]), (view.shape[0], *sizes, view.shape[1]))
    low.body.statements.append(Map(last, Scalar(0.0), "padding"))
    dst = permuted_view(last, [0, len(sizes) + 1, *range(1, len(sizes) + 1)])
    inner = dst
    for d, (before, after) in enumerate(pads):
        inner = sliced_view(inner, 2 + d, before, dst.shape[2 + d] - after)
    low.body.statements.append(Map(inner, view, "padding"))
    return dst


def _by_taps(
    low: Lowering, node: Any, windows: View, weight: Node, bias: Any, sizes: tuple[int, int, int]
) -> View | Lazy:
    """Depthwise: a channel of its own for each output channel."""
    channels, rank, taps = sizes
    shape = (windows.shape[0], *windows.shape[1 : 1 + rank], channels)

    def row(tap: int) -> View:
        buffer = low.block.add(
            f"{weight.name} tap {tap}", lambda c: c[weight].reshape(channels, taps)[:, tap].contiguous()
        )
        return broadcast_view(whole(buffer, (channels,)), shape)

    total: Any = Scalar(0.0)
    if bias is not None:
        buffer = low.block.add(f"{bias.name} by channel", lambda c: c[bias].contiguous())
        total = broadcast_view(whole(buffer, (channels,)), shape)
    ends = [(0, n) for n in windows.shape]
    for tap, place in enumerate(product(*map(range, windows.shape[1 + rank : -1]))):
        one = boxed_view(windows, [*ends[: 1 + rank], *((at, at + 1) for at in place), ends[-1]])
        x = view_without(one, range(1 + rank, 1 + 2 * rank))
        total = CExpression("__builtin_fmaf({0}, {1}, {2})", (x, row(tap), total), "float32")
    back = [0, rank + 1, *range(1, rank + 1)]
    return mapped_views(Lazy(total, shape, "float32"), lambda v: permuted_view(v, back))


def _by_products(low: Lowering, node: Any, windows: View, weight: Node, bias: Any, sizes: tuple[int, int, int]) -> View:
    """A product for each group of channels."""
    channels, inner, groups = sizes
    rank = (len(windows.shape) - 2) // 2
    outer, kernel = windows.shape[: 1 + rank], windows.shape[1 + rank : -1]
    each, depth, rows = channels // groups, inner * prod(kernel), prod(outer)
    width = (groups - 1) * each + -(-each // LANES) * LANES
    buffer = low.buffer(rows * width)
    for g in range(groups):
        part = sliced_view(windows, len(windows.shape) - 1, g * inner, (g + 1) * inner)
        x = low.rows_of(part, depth, "what the kernel sees")

        def matrix(c: Constants, g: int = g) -> Tensor:
            own = c[weight][g * each : (g + 1) * each]
            return own.permute(*range(2, own.dim()), 1, 0).reshape(depth, each)

        def padded(c: Constants, g: int = g) -> Tensor:
            return padded_bias(c[bias][g * each : (g + 1) * each])

        b = None
        if bias is not None:
            bias_buffer = low.block.add(f"{bias.name} group {g}", padded)
            b = whole(bias_buffer, (bias_buffer.size,))
        dst = View(buffer, g * each, (rows, each), (width, 1))
        multiply_by_weight(low, node, WeightMatrix(weight, f"group {g}", matrix), x, dst, b)
    products = low.reshaped(View(buffer, 0, (rows, channels), (width, 1)), (*outer, channels))
    return permuted_view(products, [0, rank + 1, *range(1, rank + 1)])


def _window_of(
    part: IndexRange, length: int, kernel: int, stride: int, pad: int, dilation: int
) -> tuple[IndexRange, int, int]:
    """The range of an input dimension that a range of the output reads, and how many zeros come before and after it."""
    start = part.start * stride - pad
    stop = (part.stop - 1) * stride - pad + (kernel - 1) * dilation + 1
    inside = IndexRange(min(max(start, 0), length), max(min(stop, length), 0))
    if inside.start >= inside.stop:  # nothing but zeros: one number is taken all the same, and lies behind them
        return IndexRange(0, 1), stop - start, 0
    return inside, max(0, -start), max(0, stop - length)


def _inputs(node: Any, box: Box) -> Iterator[tuple[Node, Box]]:
    args: Any = node.args
    source, weight, _, stride, pad, dilation, transposed, *_ = args
    if transposed:
        return
    lengths, kernel = shape_of(source)[2:], shape_of(weight)[2:]
    spans = [_window_of(*of)[0] for of in zip(box[2:], lengths, kernel, stride, pad, dilation, strict=True)]
    yield source, (box[0], IndexRange(0, shape_of(source)[1]), *spans)


OPERATORS: Final[dict[object, NativeOperator]] = {
    aten.convolution.default: NativeOperator(lower=_convolution, inputs=_inputs)
}
