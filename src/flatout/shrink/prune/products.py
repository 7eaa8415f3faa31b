"""Rules of operators that multiply by weights: what is summed over is tied to the weight's inputs.

Removed units are zero in the masked reference, so a sum over them is right without a further word. In recurrent layers and cells
a unit goes out of all gates, the state and the next step's input together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flatout.shrink.prune.operator_rules import AtenCall, Shape, Value, broadcast_units, operator_rule, pinned
from flatout.shrink.prune.terms import Dim, UnitTerms

WINDOW: Final = "the size of a convolution's window or picture"
GATES: Final = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}


@operator_rule("linear")
def _linear(call: AtenCall) -> Value:
    x, weight = call.shape("input"), call.shape("weight")
    call.terms.tie(x.dims[-1], weight.dims[-1])
    call.tie_vectors(weight.dims[0], "bias")
    return Shape((*x.dims[:-1], *weight.dims[:-1]))


@operator_rule("matmul", "mm", "bmm", "mv", "dot")
def _matmul(call: AtenCall) -> Value:
    a, b = call.shape("self", "input").dims, call.shape("mat2", "other", "vec", "tensor").dims
    return Shape(_product(call.terms, a, b))


@operator_rule("addmm", "baddbmm", "addbmm")
def _addmm(call: AtenCall) -> Value:
    a, b = (call.shape(*names).dims for names in (("mat1", "batch1"), ("mat2", "batch2")))
    product = Shape(_product(call.terms, a, b))
    return Shape(tuple(broadcast_units(call.terms, [product, call.shape("self", "input")])))


def _product(terms: UnitTerms, a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    inner = b[-2] if len(b) > 1 else b[0]
    terms.tie(a[-1], inner)
    batch = broadcast_units(terms, [Shape(a[:-2]), Shape(b[:-2])])
    return (*batch, *a[-2:-1], *b[-1:]) if len(b) > 1 else (*batch, *a[-2:-1])


@operator_rule("einsum")
def _einsum(call: AtenCall) -> Value:
    equation, tensors = str(call.args["equation"]).replace(" ", ""), call.args["tensors"]
    if "." in equation or "->" not in equation:
        return call.pin_all()
    left, right = equation.split("->")
    letters: dict[str, Dim] = {}
    for names, shape in zip(left.split(","), tensors, strict=True):
        for name, dim in zip(names, shape.dims, strict=True):
            call.terms.tie(letters.setdefault(name, dim), dim)
    return Shape(tuple(letters[name] for name in right))


@operator_rule("embedding")
def _embedding(call: AtenCall) -> Value:
    weight, indices = call.shape("weight"), call.shape("indices")
    call.terms.pin(weight.dims[0], "rows are looked up by number")
    return Shape((*indices.dims, weight.dims[1]))


@operator_rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(call: AtenCall) -> Value:
    x, weight, terms = call.shape("input"), call.shape("weight"), call.terms
    is_transposed = "transpose" in call.name or bool(call.args.get("transposed", False))
    num_spatial, num_groups = len(weight.dims) - 2, int(call.args.get("groups", 1))
    call.pin((*x.dims[-num_spatial:], *weight.dims[2:]), WINDOW)
    channels = x.dims[-num_spatial - 1]
    out = _grouped(call, channels, weight, num_groups) if num_groups > 1 else None
    if out is None:
        terms.tie(channels, weight.dims[0 if is_transposed else 1])
        out = weight.dims[1 if is_transposed else 0]
    call.tie_vectors(out, "bias")
    spatial = [pinned(size) for size in call.out_sizes()[-num_spatial:]]
    return Shape((*x.dims[: -num_spatial - 1], out, *spatial))


def _grouped(call: AtenCall, channels: Dim, weight: Shape, num_groups: int) -> Dim:
    """Each group loses the same units, or goes as a whole; the weight's first dimension has the groups."""
    terms, is_transposed = call.terms, "transpose" in call.name
    first, second = weight.dims[0], weight.dims[1]
    groups, inner = terms.split(channels, (num_groups, len(channels) // num_groups))
    if is_transposed:
        terms.tie(first, channels)
        out = terms.merge((groups, second))
    else:
        terms.tie(inner, second)
        rows, columns = terms.split(first, (num_groups, len(first) // num_groups))
        terms.tie(rows, groups)
        out = terms.merge((groups, columns))
        terms.tie(out, first)
    call.sizes.append((call.node, "groups", groups))
    return out


@operator_rule("scaled_dot_product_attention")
def _attention(call: AtenCall) -> Value:
    q, k, v = (call.shape(name).dims for name in ("query", "key", "value"))
    terms = call.terms
    terms.tie(q[-1], k[-1])
    if call.args.get("scale") is None:
        terms.pin(q[-1], "the default scale of attention is made of the head's size")
    terms.tie(k[-2], v[-2])
    terms.pin(k[-2], "softmax runs over it")
    if call.args.get("is_causal"):
        terms.pin(q[-2], "the causal mask counts it")
    batch = _batch_of_heads(call, q, k, v)
    if mask := call.maybe("attn_mask"):
        broadcast_units(terms, [Shape((*batch, q[-2], k[-2])), mask])
    return Shape((*batch, q[-2], v[-1]))


def _batch_of_heads(call: AtenCall, q: tuple[Dim, ...], k: tuple[Dim, ...], v: tuple[Dim, ...]) -> list[Dim]:
    terms = call.terms
    if not call.args.get("enable_gqa") or len(q[-3]) == len(k[-3]):
        return broadcast_units(terms, [Shape(x[:-2]) for x in (q, k, v)])
    terms.tie(k[-3], v[-3])
    shared, own = terms.split(q[-3], (len(k[-3]), len(q[-3]) // len(k[-3])))
    terms.tie(shared, k[-3])
    terms.pin(own, "heads that share keys")
    return [*broadcast_units(terms, [Shape(x[:-3]) for x in (q, k, v)]), q[-3]]


def _tie_gates(terms: UnitTerms, weights: Sequence[Shape], inputs: Dim, num_gates: int) -> Dim:
    """Weights [G*H, in], [G*H, H], then biases [G*H] if any; the hidden dimension."""
    hidden = weights[1].dims[1]
    terms.tie(weights[0].dims[1], inputs)
    for weight in weights:
        terms.tie(terms.tie_inside(weight.dims[0], num_gates), hidden)
    return hidden


@operator_rule("gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "lstm_cell")
def _cell(call: AtenCall) -> Value:
    x = call.shape("input")
    weights = [call.args[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh") if isinstance(call.args[name], Shape)]
    hidden = _tie_gates(call.terms, weights, x.dims[-1], GATES[call.name.removesuffix("_cell")])
    states = call.args["hx"] if isinstance(call.args["hx"], list) else [call.args["hx"]]
    rest = [list(x.dims[:-1]), *(list(state.dims[:-1]) for state in states)]
    batch = broadcast_units(call.terms, [Shape(tuple(dims)) for dims in rest])
    for state in states:
        call.terms.tie(state.dims[-1], hidden)
    out = Shape((*batch, hidden))
    return [out, out] if call.name == "lstm_cell" else out


@operator_rule("gru", "lstm", "rnn_tanh", "rnn_relu")
def _layers(call: AtenCall) -> Value:
    """Hidden units of all layers are tied by position: their states are one tensor [layers * directions, B, H]."""
    if "input" not in call.args or "batch_sizes" in call.args:
        return call.pin_all()  # packed sequences
    terms, x, weights = call.terms, call.shape("input"), call.args["params"]
    states = call.args["hx"] if isinstance(call.args["hx"], list) else [call.args["hx"]]
    num_directions = 2 if call.args["bidirectional"] else 1
    num_layers = int(call.args["num_layers"])
    per_cell = len(weights) // (num_layers * num_directions)
    if per_cell != (4 if call.args["has_biases"] else 2):
        return call.pin_all()  # projections
    common, features = states[0].dims[-1], x.dims[-1]
    for state in states:
        terms.tie(state.dims[-1], common)
        terms.pin(state.dims[0], "one state a layer and direction")
    for layer in range(num_layers):
        for direction in range(num_directions):
            first = (layer * num_directions + direction) * per_cell
            hidden = _tie_gates(terms, weights[first : first + per_cell], features, GATES[call.name])
            terms.tie(hidden, common)
        features = common * num_directions
    return _outputs(call, x, states, common * num_directions)


def _outputs(call: AtenCall, x: Shape, states: list[Shape], features: Dim) -> Value:
    is_batched = len(x.dims) == 3
    if is_batched:
        batch = x.dims[0 if call.args.get("batch_first") else 1]
        for state in states:
            call.terms.tie(state.dims[1], batch)
    time = x.dims[1 if is_batched and call.args.get("batch_first") else 0]
    call.terms.pin(time, "time goes on step by step")
    return [Shape((*x.dims[:-1], features)), *states]
