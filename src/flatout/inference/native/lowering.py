"""From the graph of core ATen operators to statements: views cost nothing, element-wise work joins what needs it."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from flatout.errors import NativeError
from flatout.inference.native import demand, pointwise
from flatout.inference.native.demand import Box, Span, aten, shape_of
from flatout.inference.native.packing import Block, Constants, by_columns, by_quads, by_rows, padded_bias, rounded, shifted_sums
from flatout.inference.native.rings import Window, seen
from flatout.inference.native.statements import Body, Gather, Map, Product, Push, RowWise
from flatout.inference.native.values import (
    LANES,
    Buffer,
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

_DOTS = 4
"""Products with no more outputs sum along the depth: a block of 16 columns would be mostly zeros."""
_LONGEST = 40
"""Operations of one expression: longer ones would be hard to read and slow to compile."""


class Lowering:
    """One pass over the graph, in its order. `kept` are values that inputs and states have from the start."""

    def __init__(self, nodes: list[Node], outputs: list[Node], constants: dict[Node, Const], kept: dict[Node, View]) -> None:
        self.nodes, self.constants = nodes, constants
        self.boxes = demand.demands(nodes, outputs)
        self.values: dict[Node, Value] = {**constants, **kept}
        self.boxes |= {node: demand.full(node) for node in self.values}
        self.body, self.block = Body(), Block({node: const.tensor for node, const in constants.items()})
        self.outputs = set(outputs)
        self.wanted: dict[Node, View] = {}
        """Outputs' own memory, which the values that go there are computed into."""
        self.layers: list[tuple[str, Product]] = []
        self.int8: frozenset[str] = frozenset()
        """Weights whose products are to be in 8 bits, by the name of the node that holds them."""
        self.windows: dict[Node, tuple[Window, Buffer]] = {}
        """Nodes that join a state's window with its new row."""
        self._count = 0

    def run(self) -> None:
        """Lower all that is needed. Raises NativeError with the operator and the line of the model."""
        for node in self.nodes:
            if node.op != "call_function" or node in self.values or node not in self.boxes:
                continue
            try:
                value = self._lowered(node)
            except NotImplementedError as e:
                raise NativeError(f"{e}{told_at(node)}; {_ADVICE}") from e
            self.values[node] = self._settled(node, value)

    # ------------------------------------------------------------------------------------------------------- values

    def part(self, source: Any, box: Box | None = None) -> Value:
        """A part of what a node gave; a number as it is."""
        if not isinstance(source, Node):
            return Const(torch.tensor(source), is_weight=False)
        value = self.values[source]
        box = demand.full(source) if box is None else box
        have = self.boxes[source]
        if isinstance(value, Const):
            tensor = value.tensor[tuple(slice(*span) for span in box)] if box != demand.full(source) else value.tensor
            return Const(tensor, value.is_weight)
        for dim, (span, outer) in enumerate(zip(box, have, strict=True)):
            if span != outer:
                value = mapped(value, lambda v, d=dim, s=span, o=outer: sliced(v, d, s.start - o.start, s.stop - o.start))  # type: ignore[misc]
        return value

    def expression(self, source: Any, box: Box | None, shape: tuple[int, ...]) -> Any:
        """A part as an expression over `shape`, to which it is repeated."""
        if not isinstance(source, Node):
            return Scalar(source)
        value = self.part(source, box)
        if isinstance(value, Const):
            if value.tensor.numel() == 1 and not value.is_weight:
                return Scalar(value.tensor.item())
            value = self.constant_view(source, box)
        if isinstance(value, Lazy) and prod(value.shape) < prod(shape) and num_operations(value.expr):
            value = self.materialised(value)
        value = mapped(value, lambda v: broadcast(v, shape))
        return value.expr if isinstance(value, Lazy) else value

    def constant_view(self, source: Node, box: Box | None = None) -> View:
        """A constant, or a part of it, in the block of weights."""
        value = self.part(source, box)
        assert isinstance(value, Const)
        if box is None or box == demand.full(source):
            return self.block.view(source)
        whole_view = self.block.view(source)
        for dim, span in enumerate(box):
            whole_view = sliced(whole_view, dim, *span)
        return whole_view

    def view(self, source: Any, box: Box | None = None) -> View:
        """A part in memory."""
        value = self.part(source, box)
        if isinstance(value, Const):
            return self.constant_view(source, box)
        return value if isinstance(value, View) else self.materialised(value)

    def buffer(self, size: int, dtype: str = "float32") -> Buffer:
        """Work memory, rounded up so that the last block may be written whole."""
        made = Buffer(f"b{self._count}", "work", dtype, -(-size // LANES) * LANES)
        self._count += 1
        self.body.buffers.append(made)
        return made

    def materialised(self, value: Lazy | View, into: View | None = None, note: str = "") -> View:
        """In memory, one after the other."""
        dst = into or whole(self.buffer(prod(value.shape), value.dtype), value.shape)
        self.body.statements.append(Map(dst, value.expr if isinstance(value, Lazy) else value, note))
        return dst

    def rows_of(self, value: Value, source: Any, box: Box | None, width: int) -> View:
        """(rows, width), each row's numbers one after the other."""
        if isinstance(value, Const):
            value = self.constant_view(source, box)
        shape = (prod(value.shape) // width if width else 0, width)
        if isinstance(value, View):
            seen = reshaped(value, shape)
            if seen is not None and (seen.strides[1] == 1 or width == 1):
                return seen
        seen = reshaped(self.materialised(value), shape)
        assert seen is not None
        return seen

    def _settled(self, node: Node, value: Value) -> Value:
        """Memory for what is read more than once, has grown long, or goes out."""
        if not isinstance(value, Lazy):
            return value
        into = self.wanted.get(node)
        if into is not None and value.shape == into.shape:
            return self.materialised(value, into, note_of(node))
        users = [u for u in node.users if u in self.boxes or u.op == "output"]
        size = num_operations(value.expr)
        if size and (len(users) > 1 or size > _LONGEST or node in self.outputs):
            return self.materialised(value, self._like(value), note_of(node))
        return value

    def _like(self, value: Lazy) -> View | None:
        """New memory in which numbers lie in the order of what they are made of."""
        views = [v for v in leaves(value.expr) if prod(v.shape) > 1 and all(s or n == 1 for n, s in zip(v.shape, v.strides, strict=True))]
        if not views:
            return None
        order = sorted(range(len(value.shape)), key=lambda d: -views[0].strides[d] if value.shape[d] > 1 else -prod(value.shape))
        dst = whole(self.buffer(prod(value.shape), value.dtype), [value.shape[d] for d in order])
        return permuted(dst, [order.index(d) for d in range(len(order))])

    # ---------------------------------------------------------------------------------------------------- operators

    def _lowered(self, node: Node) -> Value:
        if node in self.windows:
            return self._window(node)
        box = self.boxes[node]
        shape = tuple(span.stop - span.start for span in box)
        special = _SPECIAL.get(node.target)  # type: ignore[arg-type]
        if special is not None:
            return special(self, node, box, shape)
        if pointwise.is_pointwise(node):
            return self._pointwise(node, box, shape)
        raise NotImplementedError(f"operator {node.target} has no native code")

    def _window(self, node: Node) -> View:
        """The new row goes behind the window; the whole is seen in place."""
        window, ring = self.windows[node]
        self.boxes[node] = demand.full(node)
        rank = len(shape_of(node))
        first = [window.dim, *(d for d in range(rank) if d != window.dim)]
        value = _as_view(self, self.part(window.newest), window.newest, demand.full(window.newest))
        row = self.rows_of(mapped(value, lambda v: permuted(v, first)), window.newest, None, ring.row)
        self.body.statements.append(Push(ring, row, note_of(node)))
        return seen(ring, shape_of(node), window.dim, 0 if window.is_longer else 1)

    def _pointwise(self, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
        def one(arg: Any) -> Any:
            if isinstance(arg, Node):
                part = next(demand.by_element_of(arg, box))[1]
                return self.expression(arg, part, shape)
            return None if arg is None else Scalar(arg)

        dtype = dtype_name(node.meta["val"].dtype)
        options = {k: v for k, v in node.kwargs.items() if k in ("alpha", "rounding_mode", "approximate")}
        args = node.args[:1] if pointwise.name_of(node.target) in pointwise._SAME else node.args
        return Lazy(pointwise.expression(node, [one(a) for a in args], options, dtype), shape, dtype)

    def _seen(self, node: Node, box: Box) -> Value:
        """The part of a view's source."""
        source, part = next(demand._RULES[node.target](node, box))  # type: ignore[index]
        value = self.part(source, part)
        if isinstance(value, Const):
            return self.constant_view(source, part)
        return value


def note_of(node: Node) -> str:
    """What of the model a statement computes: its place in the tree of modules, and the operator."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((p for p, _ in reversed(list(stack.values())) if p), "")
    name = pointwise.name_of(node.target) or getattr(node.target, "__name__", str(node.target))
    return f"{path}: {name}" if path else name


def told_at(node: Node) -> str:
    """Where in the user's code a node comes from."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    places = [i for i, line in enumerate(lines) if line.startswith("File ")]
    own = [i for i in places if "/torch/" not in lines[i]] or places
    if not own:
        return ""
    at = own[-1]
    file = lines[at].removeprefix("File ").split(", in ")[0].replace('"', "").replace(", line ", ":")
    code = lines[at + 1] if at + 1 < len(lines) and not lines[at + 1].startswith("File ") else ""
    return f" ({file}: {code})" if code else f" ({file})"


_ADVICE = 'change the model there, or take build(..., backend="aoti")'


def dtype_name(dtype: torch.dtype) -> str:
    """As records name it. Raises NotImplementedError for one that native code has not."""
    name = str(dtype).removeprefix("torch.")
    if name not in ("float32", "int64", "int32", "bool"):
        raise NotImplementedError(f"numbers of {dtype} (native code computes in float32, and indexes by int64)")
    return name


# ------------------------------------------------------------------------------------------------------------ the shelf


def _permute(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    dims = [d % len(box) for d in node.args[1]]  # type: ignore[union-attr, operator]
    return mapped(low._seen(node, box), lambda v: permuted(v, dims))  # type: ignore[arg-type]


def _select(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    dim = demand.dim_of(node.args[0], node.args[1])  # type: ignore[arg-type]
    return mapped(low._seen(node, box), lambda v: without(v, [dim]))  # type: ignore[arg-type]


def _slice(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    dim, _, _, step = demand.slice_of(node)
    return mapped(low._seen(node, box), lambda v: sliced(v, dim, 0, v.shape[dim], step))  # type: ignore[arg-type]


def _unsqueeze(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    dim = node.args[1] % len(box)  # type: ignore[operator]
    return mapped(low._seen(node, box), lambda v: with_one(v, dim))  # type: ignore[arg-type]


def _squeeze(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    gone = demand.squeezed_dims(node)
    return mapped(low._seen(node, box), lambda v: without(v, list(gone)))  # type: ignore[arg-type]


def _expand(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    source: Any = node.args[0]
    value = low._seen(node, box)
    if isinstance(value, Lazy) and num_operations(value.expr) and prod(value.shape) < prod(shape):
        value = low.materialised(value)
    return mapped(value, lambda v: broadcast(v, shape))  # type: ignore[arg-type]


def _view(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    value = low._seen(node, box)
    views = list(leaves(value.expr)) if isinstance(value, Lazy) else [value]
    if isinstance(value, Const) or any(reshaped(v, shape) is None for v in views):  # type: ignore[arg-type]
        value = low.materialised(value)  # type: ignore[arg-type]
    if isinstance(value, Lazy) and not views:
        return value._replace(shape=shape)
    if isinstance(value, Lazy):
        changed = mapped(value, lambda v: reshaped(v, shape) or v)
        return changed._replace(shape=shape)  # type: ignore[call-arg]
    seen = reshaped(value, shape)  # type: ignore[arg-type]
    assert seen is not None
    return seen


def _getitem(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    source: Any = node.args[0]
    if source.target not in demand._SPLITS and node.args[1] != 0:
        raise NotImplementedError(f"the {node.args[1]}th result of {source.target}")
    return low._seen(node, box)


def _same(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    return low._seen(node, box)


def _cat(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    parts: Any = node.args[0]
    dim = demand.dim_of(node, node.args[1] if len(node.args) > 1 else 0)  # type: ignore[arg-type]
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


def _linear(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    args: Any = node.args
    bias, a, b = args if node.target == aten.addmm.default else (None, *args)
    if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
        raise NotImplementedError("addmm with alpha or beta")
    depth = Span(0, shape_of(a)[1])
    return low_product(low, node, (a, (box[0], depth)), (b, (depth, box[1])), bias, box)


def low_product(low: Lowering, node: Node, a: tuple[Node, Box], b: tuple[Node, Box], bias: Any, box: Box) -> View:
    """One product of matrices: of rows with a constant, or of two that are computed."""
    m, k = (s.stop - s.start for s in a[1])
    n = b[1][1].stop - b[1][1].start
    x = low.rows_of(low.part(*a), *a, k)
    if bias is not None and shape_of(bias)[-1:] != shape_of(node)[-1:] or (bias is not None and len(shape_of(bias)) > 1 and m > 1):
        raise NotImplementedError(f"addmm that adds a tensor of shape {shape_of(bias)}")
    value = low.part(*b)
    if isinstance(value, Const):
        return constant_product(low, node, x, b, bias, box[-1], (m, n, k))
    made = dynamic_product(low, node, x, value, (m, n, k))
    if bias is None:
        return made
    part = next(demand.by_element_of(bias, box))[1]
    added = pointwise._MADE["add"](made, low.expression(bias, part, made.shape))
    return low.materialised(Lazy(added, made.shape, "float32"))


def constant_product(
    low: Lowering, node: Node, x: View, b: tuple[Node, Box], bias: Any, columns: Span, sizes: tuple[int, int, int]
) -> View:
    """rows (m, k) times a weight (k, n)."""
    m, n, k = sizes
    source, part = b
    rows, cols = (slice(*span) for span in part)
    is_int8 = source.name in low.int8
    is_dot = n <= _DOTS and k >= LANES and not is_int8
    make, kind = (by_rows, "rows") if is_dot else (by_columns, "columns")
    packed = low.block.add(f"{source.name} {kind} {part}", lambda c: make(c[source][rows, cols]))
    bias_view = None
    if bias is not None:
        if not isinstance(low.values[bias], Const):
            raise NotImplementedError("a bias that is computed")
        cut = slice(*columns)
        bias_buffer = low.block.add(f"{bias.name} bias {columns}", lambda c: padded_bias(c[bias].flatten()[cut]))
        bias_view = whole(bias_buffer, (bias_buffer.size,))
    width = n if is_dot else -(-n // LANES) * LANES
    dst = View(low.buffer(m * width), 0, (m, n), (width, 1))
    row, block = (-(-k // LANES) * LANES, 0) if is_dot else (LANES, k * LANES)
    if is_int8:
        product = int8_product(low, node, source, (rows, cols), x, dst, (n, k), bias_view)
        low.body.statements.append(product)
        low.layers.append((source.name, product))
        return dst
    product = Product(dst, x, whole(packed, (packed.size,)), n, k, row, block, partial_sums(n, k), bias_view, is_dot, note=note_of(node))  # fmt: skip
    low.body.statements.append(product)
    low.layers.append((source.name, product))
    return dst


def int8_product(
    low: Lowering, node: Node, source: Node, part: tuple[slice, slice], x: View, dst: View, sizes: tuple[int, int], bias: View | None
) -> Product:
    """The same with weights and activations of 8 bits."""
    n, k = sizes
    name = f"{source.name} int8 {part}"
    weights = low.block.add(f"{name} numbers", lambda c: by_quads(rounded(c[source][part])[0]))
    scales = low.block.add(f"{name} steps", lambda c: padded_bias(rounded(c[source][part])[1]))
    sums = low.block.add(f"{name} sums", lambda c: shifted_sums(rounded(c[source][part])[0]))
    w, s, t = (whole(b, (b.size,)) for b in (weights, scales, sums))
    return Product(dst, x, w, n, k, 0, 0, 1, bias, scales=s, sums=t, note=note_of(node))


def partial_sums(n: int, k: int) -> int:
    """Of each output: fewer blocks of columns need more, so that as many additions run beside each other."""
    blocks = -(-n // LANES)
    parts = 1 if blocks >= 8 else 2 if blocks >= 3 else 4
    return parts if k >= 8 * parts else 1


def dynamic_product(low: Lowering, node: Node, x: View, value: Value, sizes: tuple[int, int, int]) -> View:
    """rows (m, k) times what is computed (k, n)."""
    m, n, k = sizes
    width = -(-n // LANES) * LANES
    w = value if isinstance(value, View) else None
    if w is None or w.strides[1] != 1 or n % LANES or w.buffer.kind == "ring":
        buffer = low.buffer(k * width)
        if n % LANES:  # what the last block reads beyond must be numbers
            low.body.statements.append(Map(View(buffer, n, (k, width - n), (width, 1)), Scalar(0.0), "padding"))
        dst = View(buffer, 0, (k, n), (width, 1))
        w = low.materialised(value, dst)  # type: ignore[arg-type]
    dst = View(low.buffer(m * width), 0, (m, n), (width, 1))
    low.body.statements.append(Product(dst, x, w, n, k, w.strides[0], LANES, partial_sums(n, k), note=note_of(node)))
    return dst


def _bmm(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    a, b = node.args
    k = shape_of(a)[2]  # type: ignore[arg-type]
    batch, m, n = shape
    width = -(-n // LANES) * LANES
    x, w = low.part(a, (box[0], box[1], Span(0, k))), low.part(b, (box[0], Span(0, k), box[2]))
    left = x if isinstance(x, View) and x.strides[2] == 1 else low.materialised(_as_view(low, x, a, (box[0], box[1], Span(0, k))))
    right = _as_view(low, w, b, (box[0], Span(0, k), box[2]))
    if not isinstance(right, View) or right.strides[2] != 1 or n % LANES or right.buffer.kind == "ring":
        buffer = low.buffer(batch * k * width)
        if n % LANES:
            low.body.statements.append(Map(View(buffer, n, (batch * k, width - n), (width, 1)), Scalar(0.0), "padding"))
        right = low.materialised(right, View(buffer, 0, (batch, k, n), (k * width, width, 1)))
    dst = View(low.buffer(batch * m * width), 0, (batch, m, n), (m * width, width, 1))
    for i in range(batch):
        rows, columns = (without(sliced(v, 0, i, i + 1), [0]) for v in (left, right))
        into = without(sliced(dst, 0, i, i + 1), [0])
        row = columns.strides[0]
        low.body.statements.append(Product(into, rows, columns, n, k, row, LANES, partial_sums(n, k), note=note_of(node)))
    return dst


def _as_view(low: Lowering, value: Value, source: Any, box: Box) -> Any:
    return low.constant_view(source, box) if isinstance(value, Const) else value


def _softmax(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    source, dim = node.args[0], demand.dim_of(node, node.args[1])  # type: ignore[arg-type]
    kinds = {aten._softmax.default: "softmax", aten._safe_softmax.default: "safe_softmax"}
    value = _as_view(low, low._seen(node, box), source, box)
    last = [d for d in range(len(shape)) if d != dim] + [dim]
    moved = mapped(value, lambda v: permuted(v, last))
    src = low.rows_of(moved, source, None, shape[dim])
    dst = whole(low.buffer(prod(shape)), (src.shape[0], shape[dim]))
    low.body.statements.append(RowWise(kinds.get(node.target, "log_softmax"), dst, src, note=note_of(node)))  # type: ignore[arg-type]
    seen = reshaped(dst, tuple(shape[d] for d in last))
    assert seen is not None
    return permuted(seen, [last.index(d) for d in range(len(shape))])


def _layer_norm(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    source, sizes, weight, bias, eps = node.args
    width = prod(sizes)  # type: ignore[arg-type]
    value = _as_view(low, low._seen(node, box), source, box)
    src = low.rows_of(value, source, None, width)
    sides = [low.rows_of(low.part(s), s, None, width) if s is not None else None for s in (weight, bias)]
    dst = whole(low.buffer(prod(shape)), (src.shape[0], width))
    sides = [View(s.buffer, s.offset, (width,), (1,)) if s is not None else None for s in sides]
    low.body.statements.append(RowWise("layer_norm", dst, src, float(eps), sides[0], sides[1], note_of(node)))  # type: ignore[arg-type]
    return reshaped(dst, shape)  # type: ignore[return-value]


_REDUCED = {"sum": "sum", "mean": "mean", "amax": "max", "amin": "min", "var": "var", "prod": "prod", "any": "any",
            "all": "all", "argmax": "argmax", "argmin": "argmin", "max": "max", "min": "min"}  # fmt: skip


def _reduce(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    """Over any dimensions: they go last, and rows are reduced."""
    source: Any = node.args[0]
    rank = len(shape_of(source))
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    listed = list(range(rank)) if given is None or given == [] else [given] if isinstance(given, int) else list(given)  # type: ignore[call-overload]
    over = sorted(d % rank for d in listed)
    kind: Any = _REDUCED[pointwise.name_of(node.target)]
    stay = [d for d in range(rank) if d not in over]
    value = _as_view(low, low.part(source), source, demand.full(source))
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
    low.body.statements.append(RowWise(kind, dst, src, float(1 if correction is None else correction), note=note_of(node)))  # type: ignore[arg-type]
    seen = reshaped(dst, shape_of(node))
    assert seen is not None
    for dim, span in enumerate(box):
        seen = sliced(seen, dim, *span)
    return seen


def _embedding(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    table, index = node.args[0], node.args[1]
    if not isinstance(low.values[table], Const):  # type: ignore[index]
        raise NotImplementedError("an embedding whose table is computed")
    return _gathered(low, node, low.constant_view(table), low.view(index, box[:-1]), shape)  # type: ignore[arg-type]


def _gathered(low: Lowering, node: Node, table: View, index: View, shape: tuple[int, ...]) -> View:
    if index.dtype not in ("int64", "int32"):
        raise NotImplementedError(f"an index of {index.dtype}")
    flat = reshaped(index, (prod(index.shape),)) or reshaped(low.materialised(index), (prod(index.shape),))
    assert flat is not None
    dst = whole(low.buffer(prod(shape), table.dtype), (flat.shape[0], table.shape[1]))
    low.body.statements.append(Gather(dst, table, flat, note_of(node)))
    return reshaped(dst, shape)  # type: ignore[return-value]


def _index(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    """One index tensor, for one dimension."""
    source: Any = node.args[0]
    indices: Any = node.args[1]
    if node.target == aten.index_select.default:
        dim, which = demand.dim_of(source, node.args[1]), node.args[2]  # type: ignore[arg-type]
    else:
        dims = [d for d, i in enumerate(indices) if i is not None]
        if len(dims) != 1:
            raise NotImplementedError("an index of several tensors")
        dim, which = dims[0], indices[dims[0]]
    if which.meta["val"].dtype == torch.bool:
        raise NotImplementedError("an index by a mask, whose result has no fixed size")
    rank = len(shape_of(source))
    value = _as_view(low, low.part(source), source, demand.full(source))
    order = [dim, *(d for d in range(rank) if d != dim)]
    rest = tuple(shape_of(source)[d] for d in order[1:])
    moved = mapped(value, lambda v: permuted(v, order))
    table = low.rows_of(moved, source, None, prod(rest))
    index = low.view(which)
    found = _gathered(low, node, table, index, (*index.shape, *rest))
    wide = len(index.shape)
    back = [*range(wide, wide + dim), *range(wide), *range(wide + dim, wide + rank - 1)]
    seen = permuted(found, back)
    for d, span in enumerate(box):
        seen = sliced(seen, d, *span)
    return seen


def _convolution(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    from flatout.inference.native.convolution import lowered

    return lowered(low, node, box)


def _batch_norm(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
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
    scaled = pointwise.Call("__builtin_fmaf({0}, {1}, {2})", (x, made(0), made(1)), "float32")
    return Lazy(scaled, shape, "float32")


def _constant_pad(low: Lowering, node: Node, box: Box, shape: tuple[int, ...]) -> Value:
    source, pads = node.args[0], list(node.args[1])  # type: ignore[call-overload]
    value = node.args[2] if len(node.args) > 2 else 0.0
    if min(pads) < 0:
        raise NotImplementedError("padding by less than nothing")
    outer = shape_of(node)
    dst = whole(low.buffer(prod(outer)), outer)
    low.body.statements.append(Map(dst, Scalar(float(value)), note_of(node)))  # type: ignore[arg-type]
    inner = dst
    for i, dim in zip(range(0, len(pads), 2), reversed(range(len(outer))), strict=False):
        inner = sliced(inner, dim, pads[i], outer[dim] - pads[i + 1])
    low.body.statements.append(Map(inner, low.expression(source, None, inner.shape), note_of(node)))
    for dim, span in enumerate(box):
        dst = sliced(dst, dim, *span)
    return dst


_SPECIAL: dict[object, Any] = {
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
    aten.mm.default: _linear,
    aten.addmm.default: _linear,
    aten.bmm.default: _bmm,
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
