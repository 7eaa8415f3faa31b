"""Rules of operators that multiply by weights: what is summed over is tied to the weight's inputs.

Removed units are zero in the masked reference, so a sum over them is right without a further word.
"""

from __future__ import annotations

from flatout.compression.pruning.calls import Call, Shape, Value, broadcast, pinned, rule
from flatout.compression.pruning.terms import Dim, Terms

WINDOW = "the size of a convolution's window or picture"


@rule("linear")
def _linear(call: Call) -> Value:
    x, weight = call.shape("input"), call.shape("weight")
    call.terms.tie(x.dims[-1], weight.dims[-1])
    if bias := call.maybe("bias"):
        call.terms.tie(weight.dims[0], bias.dims[0])
    return Shape((*x.dims[:-1], *weight.dims[:-1]))


@rule("matmul", "mm", "bmm", "mv", "dot")
def _matmul(call: Call) -> Value:
    a, b = call.shape("self", "input").dims, call.shape("mat2", "other", "vec", "tensor").dims
    return Shape(_product(call.terms, a, b))


@rule("addmm", "baddbmm", "addbmm")
def _addmm(call: Call) -> Value:
    a, b = (call.shape(*names).dims for names in (("mat1", "batch1"), ("mat2", "batch2")))
    product = Shape(_product(call.terms, a, b))
    return Shape(tuple(broadcast(call.terms, [product, call.shape("self", "input")])))


def _product(terms: Terms, a: tuple[Dim, ...], b: tuple[Dim, ...]) -> tuple[Dim, ...]:
    inner = b[-2] if len(b) > 1 else b[0]
    terms.tie(a[-1], inner)
    batch = broadcast(terms, [Shape(a[:-2]), Shape(b[:-2])])
    return (*batch, *a[-2:-1], *b[-1:]) if len(b) > 1 else (*batch, *a[-2:-1])


@rule("einsum")
def _einsum(call: Call) -> Value:
    equation, tensors = str(call.args["equation"]).replace(" ", ""), call.args["tensors"]
    if "." in equation or "->" not in equation:
        return call.pin_all()
    left, right = equation.split("->")
    letters: dict[str, Dim] = {}
    for names, shape in zip(left.split(","), tensors, strict=True):
        for name, dim in zip(names, shape.dims, strict=True):
            call.terms.tie(letters.setdefault(name, dim), dim)
    return Shape(tuple(letters[name] for name in right))


@rule("embedding")
def _embedding(call: Call) -> Value:
    weight, indices = call.shape("weight"), call.shape("indices")
    call.terms.pin(weight.dims[0], "rows are looked up by number")
    return Shape((*indices.dims, weight.dims[1]))


@rule("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(call: Call) -> Value:
    x, weight, terms = call.shape("input"), call.shape("weight"), call.terms
    is_turned = "transpose" in call.name or bool(call.args.get("transposed", False))
    num_spatial, num_groups = len(weight.dims) - 2, int(call.args.get("groups", 1))
    for dim in (*x.dims[-num_spatial:], *weight.dims[2:]):
        terms.pin(dim, WINDOW)
    channels = x.dims[-num_spatial - 1]
    out = _grouped(call, channels, weight, num_groups) if num_groups > 1 else None
    if out is None:
        terms.tie(channels, weight.dims[0 if is_turned else 1])
        out = weight.dims[1 if is_turned else 0]
    if bias := call.maybe("bias"):
        terms.tie(out, bias.dims[0])
    spatial = [pinned(size) for size in call.out_sizes()[-num_spatial:]]
    return Shape((*x.dims[: -num_spatial - 1], out, *spatial))


def _grouped(call: Call, channels: Dim, weight: Shape, num_groups: int) -> Dim:
    """Each group loses the same units, or goes as a whole; the weight's first dimension has the groups."""
    terms, is_turned = call.terms, "transpose" in call.name
    first, second = weight.dims[0], weight.dims[1]
    groups, inner = terms.split(channels, (num_groups, len(channels) // num_groups))
    if is_turned:
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


@rule("scaled_dot_product_attention")
def _attention(call: Call) -> Value:
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
        broadcast(terms, [Shape((*batch, q[-2], k[-2])), mask])
    return Shape((*batch, q[-2], v[-1]))


def _batch_of_heads(call: Call, q: tuple[Dim, ...], k: tuple[Dim, ...], v: tuple[Dim, ...]) -> list[Dim]:
    terms = call.terms
    if not call.args.get("enable_gqa") or len(q[-3]) == len(k[-3]):
        return broadcast(terms, [Shape(x[:-2]) for x in (q, k, v)])
    terms.tie(k[-3], v[-3])
    shared, own = terms.split(q[-3], (len(k[-3]), len(q[-3]) // len(k[-3])))
    terms.tie(shared, k[-3])
    terms.pin(own, "heads that share keys")
    return [*broadcast(terms, [Shape(x[:-3]) for x in (q, k, v)]), q[-3]]
