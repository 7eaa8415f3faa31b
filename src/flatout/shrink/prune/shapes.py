"""Rules of operators that move units about: views, permutations, parts and joins."""

from __future__ import annotations

from itertools import islice
from math import prod

from flatout.shrink.prune.operator_rules import AtenCall, Shape, Value, broadcast_units, operator_rule, pinned
from flatout.shrink.prune.terms import Dim, UnitTerms


@operator_rule(
    "contiguous", "clone", "detach", "alias", "dropout", "alpha_dropout", "feature_dropout", "to", "_to_copy", "type_as",
    "lift_fresh_copy", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "view_as_real_copy",
    "hardswish", "hardtanh", "relu6", "triu", "tril", "positive", "nan_to_num", "requires_grad_", "detach_", "resolve_conj",
)  # fmt: skip
def _same(call: AtenCall) -> Value:
    x = call.shape("self", "input")
    if call.name in ("triu", "tril"):
        call.pin(x.dims[-2:], "the triangle counts it")
    return x


@operator_rule("copy_", "copy", "where", "mish", "log_sigmoid", "fill_", "masked_fill", "masked_fill_")
def _pointwise(call: AtenCall) -> Value:
    return pointwise(call)


def pointwise(call: AtenCall) -> Value:
    shapes = [value for value in call.args.values() if isinstance(value, Shape)]
    return Shape(tuple(broadcast_units(call.terms, shapes)))


@operator_rule("prelu")
def _prelu(call: AtenCall) -> Value:
    x, weight = call.shape("self", "input"), call.shape("weight")
    if len(weight.dims[0]) > 1:
        call.terms.tie(x.dims[1], weight.dims[0])
    return x


@operator_rule("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "empty", "new_empty")
def _filled(call: AtenCall) -> Value:
    """Alike everywhere: as wide as what it meets, if the code makes it so (found by running)."""
    return Shape(tuple(call.terms.fresh(size) for size in call.out_sizes()))


@operator_rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias", "view_copy")
def _view(call: AtenCall) -> Value:
    x, sizes = call.shape("self", "input"), call.out_sizes()
    return Shape(tuple(reshaped_units(call.terms, list(x.dims), sizes)))


def reshaped_units(terms: UnitTerms, dims: list[Dim], sizes: tuple[int, ...]) -> list[Dim]:
    """Split dimensions into their common factors, and join these to the new ones."""
    out: list[Dim] = []
    old = [dim for dim in dims if len(dim) > 1]
    wanted = list(sizes)
    while wanted:
        if wanted[0] == 1:
            wanted.pop(0)
            out.append(pinned(1))
            continue
        taken, new = [old.pop(0)], [wanted.pop(0)]
        while (have := prod(map(len, taken))) != (want := prod(new)):
            if have < want:
                taken.append(old.pop(0))
            else:
                new.append(wanted.pop(0))
        out.extend(_regrouped(terms, taken, new))
    return out


def _regrouped(terms: UnitTerms, dims: list[Dim], sizes: list[int]) -> list[Dim]:
    parts = _common_factors([len(dim) for dim in dims], sizes)
    if parts is None:
        for dim in dims:
            terms.pin(dim)
        return [pinned(size) for size in sizes]
    factors = iter([factor for dim, own in zip(dims, parts[0], strict=True) for factor in terms.split(dim, own)])
    return [terms.merge(list(islice(factors, len(own)))) for own in parts[1]]


def _common_factors(old: list[int], new: list[int]) -> tuple[list[list[int]], list[list[int]]] | None:
    """Factors of each old and each new size, the same sequence in both; None where one size cuts across another.

    >>> _common_factors([4, 32], [16, 8])
    ([[4], [4, 8]], [[4, 4], [8]])
    """
    left: list[list[int]] = [[]]
    right: list[list[int]] = [[]]
    a, b, i, j = old[0], new[0], 0, 0
    while True:
        small, large = min(a, b), max(a, b)
        if large % small:
            return None
        if small > 1 or large == 1:
            left[-1].append(small)
            right[-1].append(small)
        a, b = a // small, b // small
        if a == 1:
            i += 1
        if b == 1:
            j += 1
        if i == len(old) or j == len(new):
            return (left, right) if i == len(old) and j == len(new) else None
        if a == 1:
            a = old[i]
            left.append([])
        if b == 1:
            b = new[j]
            right.append([])


@operator_rule("permute")
def _permute(call: AtenCall) -> Value:
    x = call.shape("self", "input")
    return Shape(tuple(x.dims[d] for d in call.args["dims"]))


@operator_rule("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint")
def _transpose(call: AtenCall) -> Value:
    x = list(call.shape("self", "input").dims)
    names = [n for n in ("dim0", "dim1", "axis0", "axis1") if n in call.args]
    a, b = (call.args[n] for n in names[:2]) if names else (-1, -2 if len(x) > 1 else -1)
    x[a], x[b] = x[b], x[a]
    return Shape(tuple(x))


@operator_rule("movedim", "moveaxis")
def _movedim(call: AtenCall) -> Value:
    x = list(call.shape("self").dims)
    source, target = call.args["source"], call.args["destination"]
    if not isinstance(source, int) and len(source) != 1:
        return call.pin_all()
    a, b = (s if isinstance(s, int) else s[0] for s in (source, target))
    x.insert(b % len(x), x.pop(a))
    return Shape(tuple(x))


@operator_rule("squeeze", "unsqueeze")
def _squeeze(call: AtenCall) -> Value:
    """Only dimensions of size 1 come or go, and these carry no units."""
    rest = [dim for dim in call.shape("self").dims if len(dim) > 1]
    return Shape(tuple(pinned(1) if size == 1 else rest.pop(0) for size in call.out_sizes()))


@operator_rule("expand", "expand_as", "broadcast_to")
def _expand(call: AtenCall) -> Value:
    x, sizes = call.shape("self"), call.out_sizes()
    own = (*(pinned(1) for _ in range(len(sizes) - len(x.dims))), *x.dims)
    other = call.maybe("other")
    dims = (
        dim if len(dim) == size else call.terms.fresh(size) if other is None else other.dims[d]
        for d, (dim, size) in enumerate(zip(own, sizes, strict=True))
    )
    return Shape(tuple(dims))


@operator_rule("repeat", "tile")
def _repeat(call: AtenCall) -> Value:
    x, times = call.shape("self"), list(call.args.get("repeats", call.args.get("dims", [])))
    own = [*(pinned(1) for _ in range(len(times) - len(x.dims))), *x.dims]
    times = [1] * (len(own) - len(times)) + times
    dims = [dim * n if len(dim) > 1 or n == 1 else call.terms.fresh(n) for dim, n in zip(own, times, strict=True)]
    return Shape(tuple(dims))


@operator_rule("cat", "concat", "concatenate")
def _cat(call: AtenCall) -> Value:
    shapes, place = [s for s in call.args["tensors"] if len(s.dims) > 1 or s.sizes != (0,)], call.args.get("dim", 0)
    rank = len(shapes[0].dims)
    place %= rank
    joined: Dim = [term for shape in shapes for term in shape.dims[place]]
    others = [shape.with_dim(place, pinned(1)) for shape in shapes]
    return Shape(tuple(broadcast_units(call.terms, others))).with_dim(place, joined)


@operator_rule("stack")
def _stack(call: AtenCall) -> Value:
    shapes = call.args["tensors"]
    dims = broadcast_units(call.terms, shapes)
    place = call.args.get("dim", 0) % (len(dims) + 1)
    dims.insert(place, pinned(len(shapes)))
    return Shape(tuple(dims))


@operator_rule("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
def _parts(call: AtenCall) -> Value:
    """Parts of equal size lose the same units: they stay parts of equal size, and code that counts parts stays right."""
    x, place = call.shape("self"), call.args.get("dim", 0)
    sizes = [part.shape[place] for part in call.node.meta["val"]]
    dim = x.dims[place]
    if len(set(sizes)) == 1 and len(sizes) > 1:
        call.terms.tie_inside(dim, len(sizes))
    units = iter(dim)
    return [x.with_dim(place, list(islice(units, size))) for size in sizes]


@operator_rule("slice", "narrow")
def _slice(call: AtenCall) -> Value:
    """Which units it takes is known; whether the code still takes them when some are gone is found by running."""
    x, place = call.shape("self"), call.args.get("dim", 0)
    start, end = call.args.get("start"), call.args.get("end")
    if "length" in call.args:
        end = start + call.args["length"]
    return x.with_dim(place, x.dims[place][slice(start, end, call.args.get("step", 1))])


@operator_rule("select", "unbind")
def _select(call: AtenCall) -> Value:
    x, place = call.shape("self"), call.args.get("dim", 0)
    call.terms.pin(x.dims[place], "one of it is taken by number")
    own = list(x.dims)
    size = len(own.pop(place))
    return Shape(tuple(own)) if call.name == "select" else [Shape(tuple(own))] * size


@operator_rule("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(call: AtenCall) -> Value:
    """Channels go with all the pixels they are made of, or all that are made of them."""
    x, sizes = call.shape("self"), call.out_sizes()
    call.pin(x.dims[-2:], "a picture's size")
    few, many = sorted((len(x.dims[-3]), sizes[-3]))
    if call.name == "pixel_shuffle":
        channels, pixels = call.terms.split(x.dims[-3], (few, many // few))
        call.terms.pin(pixels, "a picture's size")
    else:
        channels = call.terms.merge((x.dims[-3], pinned(many // few)))
    return Shape((*x.dims[:-3], channels, *(pinned(size) for size in sizes[-2:])))


@operator_rule("glu")
def _glu(call: AtenCall) -> Value:
    x, place = call.shape("self"), call.args.get("dim", -1)
    return x.with_dim(place, call.terms.tie_inside(x.dims[place], 2))


@operator_rule(
    "pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"
)
def _pad(call: AtenCall) -> Value:
    x, pads = call.shape("self"), list(call.args.get("pad", call.args.get("padding", [])))
    padded = [-1 - i // 2 for i, pad in enumerate(pads) if pad]
    call.pin((x.dims[place] for place in padded), "padded")
    for place in padded:
        x = x.with_dim(place, pinned(call.out_sizes()[place]))
    return x


@operator_rule(
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d", "_adaptive_avg_pool2d", "_upsample_nearest_exact2d",
)  # fmt: skip
def _pool(call: AtenCall) -> Value:
    x, sizes = call.shape("self", "input"), call.out_sizes()
    num = int(call.name[-2])
    call.pin(x.dims[-num:], "a picture's size")
    return Shape((*x.dims[:-num], *(pinned(size) for size in sizes[-num:])))
