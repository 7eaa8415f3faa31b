"""Convolutions as products: what a kernel sees of the input is a view through strides, or one copy of it."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor
from torch.fx import Node

from flatout.inference.native.demand import Box, Span, shape_of, window_of
from flatout.inference.native.lowering import Lowering
from flatout.inference.native.packing import Constants, padded_bias
from flatout.inference.native.products import Taken, multiply
from flatout.inference.native.statements import Map
from flatout.inference.native.values import (
    LANES,
    Call,
    Const,
    Lazy,
    Scalar,
    Value,
    View,
    broadcast,
    mapped,
    permuted,
    reshaped,
    sliced,
    whole,
)

_TAPS = 16
"""A depthwise kernel of no more is written out, a multiplication each."""


def lowered(low: Lowering, node: Any, box: Box) -> Value:
    """The part `box` of a convolution of any number of dimensions. Raises NotImplementedError for what is not supported."""
    args: Any = node.args
    source, weight, bias, stride, pad, dilation, transposed, _, groups = args
    if transposed:
        raise NotImplementedError("a transposed convolution")
    if not isinstance(low.values[weight], Const) or (bias is not None and not isinstance(low.values[bias], Const)):
        raise NotImplementedError("a convolution whose weights are computed")
    if box[1] != Span(0, shape_of(node)[1]):
        box = (box[0], Span(0, shape_of(node)[1]), *box[2:])  # all channels; what is too much is cut off below
    kernel = shape_of(weight)[2:]
    seen = _windows(low, source, box, kernel, (stride, pad, dilation))
    outer = tuple(s.stop - s.start for s in box[2:])
    channels, inner = shape_of(node)[1], shape_of(weight)[1]
    if inner == 1 and channels == groups and prod(kernel) <= _TAPS:
        made = _by_taps(low, node, seen, weight, bias, (channels, len(outer), prod(kernel)))
    else:
        made = _by_products(low, node, seen, weight, bias, (channels, inner, groups))
    want = low.boxes[node]
    return mapped(made, lambda v: sliced(v, 1, *want[1])) if want[1] != box[1] else made


def _windows(low: Lowering, source: Any, box: Box, kernel: tuple[int, ...], how: Any) -> View:
    """(batch, *out, *kernel, channels): what each output sees."""
    lengths = shape_of(source)[2:]
    parts = [window_of(*of) for of in zip(box[2:], lengths, kernel, how[0], how[1], how[2], strict=True)]
    inside: Box = (box[0], Span(0, shape_of(source)[1]), *(p[0] for p in parts))
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
    dst = permuted(last, [0, len(sizes) + 1, *range(1, len(sizes) + 1)])
    inner = dst
    for d, (before, after) in enumerate(pads):
        inner = sliced(inner, 2 + d, before, dst.shape[2 + d] - after)
    low.body.statements.append(Map(inner, view, "padding"))
    return dst


def _by_taps(low: Lowering, node: Any, seen: View, weight: Node, bias: Any, sizes: tuple[int, int, int]) -> View | Lazy:
    """Depthwise: a channel of its own for each output channel."""
    channels, rank, taps = sizes
    shape = (seen.shape[0], *seen.shape[1 : 1 + rank], channels)

    def row(tap: int) -> View:
        buffer = low.block.add(
            f"{weight.name} tap {tap}", lambda c: c[weight].reshape(channels, taps)[:, tap].contiguous()
        )
        return broadcast(whole(buffer, (channels,)), shape)

    made: Any = Scalar(0.0)
    if bias is not None:
        buffer = low.block.add(f"{bias.name} by channel", lambda c: c[bias].contiguous())
        made = broadcast(whole(buffer, (channels,)), shape)
    flat = [_at(seen, rank, tap) for tap in range(taps)]
    for tap in range(taps):
        made = Call("__builtin_fmaf({0}, {1}, {2})", (flat[tap], row(tap), made), "float32")
    back = [0, rank + 1, *range(1, rank + 1)]
    return mapped(Lazy(made, shape, "float32"), lambda v: permuted(v, back))


def _at(seen: View, rank: int, tap: int) -> View:
    """One place of the kernel, in C order."""
    for d in reversed(range(rank)):
        dim, length = 1 + rank + d, seen.shape[1 + rank + d]
        tap, at = divmod(tap, length)
        seen = View(
            seen.buffer,
            seen.offset + at * seen.strides[dim],
            (*seen.shape[:dim], *seen.shape[dim + 1 :]),
            (*seen.strides[:dim], *seen.strides[dim + 1 :]),
        )
    return seen


def _by_products(low: Lowering, node: Any, seen: View, weight: Node, bias: Any, sizes: tuple[int, int, int]) -> View:
    """A product for each group of channels."""
    channels, inner, groups = sizes
    rank = (len(seen.shape) - 2) // 2
    outer, kernel = seen.shape[: 1 + rank], seen.shape[1 + rank : -1]
    each, depth, rows = channels // groups, inner * prod(kernel), prod(outer)
    width = (groups - 1) * each + -(-each // LANES) * LANES
    buffer = low.buffer(rows * width)
    for g in range(groups):
        part = sliced(seen, len(seen.shape) - 1, g * inner, (g + 1) * inner)
        x = reshaped(part, (rows, depth))
        if x is None or (x.strides[1] != 1 and depth > 1):
            x = reshaped(low.materialised(part, note="what the kernel sees"), (rows, depth))
        assert x is not None

        def matrix(c: Constants, g: int = g) -> Tensor:
            own = c[weight][g * each : (g + 1) * each]
            return own.permute(*range(2, own.dim()), 1, 0).reshape(depth, each)

        def padded(c: Constants, g: int = g) -> Tensor:
            return padded_bias(c[bias][g * each : (g + 1) * each])

        b = None
        if bias is not None:
            held = low.block.add(f"{bias.name} group {g}", padded)
            b = whole(held, (held.size,))
        dst = View(buffer, g * each, (rows, each), (width, 1))
        multiply(low, node, Taken(weight, f"group {g}", matrix), x, dst, b)
    seen_out = reshaped(View(buffer, 0, (rows, channels), (width, 1)), (*outer, channels))
    assert seen_out is not None
    return permuted(seen_out, [0, rank + 1, *range(1, rank + 1)])
