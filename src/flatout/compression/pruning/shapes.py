"""Rules of operators that move units about: views, permutations, parts and joins."""

from __future__ import annotations

from math import prod

from flatout.compression.pruning.calls import Call, Shape, Value, broadcast, pinned, rule
from flatout.compression.pruning.terms import Dim, Terms


@rule(
    "contiguous", "clone", "detach", "alias", "dropout", "alpha_dropout", "feature_dropout", "to", "_to_copy", "type_as",
    "lift_fresh_copy", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "view_as_real_copy",
    "hardswish", "hardtanh", "relu6", "triu", "tril", "positive", "nan_to_num", "requires_grad_", "detach_", "resolve_conj",
)  # fmt: skip
def _same(call: Call) -> Value:
    x = call.shape("self", "input")
    if call.name in ("triu", "tril"):
        for dim in x.dims[-2:]:
            call.terms.pin(dim, "the triangle counts it")
    return x


@rule("copy_", "copy", "where", "mish", "log_sigmoid", "fill_", "masked_fill", "masked_fill_")
def _pointwise(call: Call) -> Value:
    return pointwise(call)


def pointwise(call: Call) -> Value:
    shapes = [value for value in call.args.values() if isinstance(value, Shape)]
    return Shape(tuple(broadcast(call.terms, shapes)))


@rule("prelu")
def _prelu(call: Call) -> Value:
    x, weight = call.shape("self", "input"), call.shape("weight")
    if len(weight.dims[0]) > 1:
        call.terms.tie(x.dims[1], weight.dims[0])
    return x


@rule("zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "empty", "new_empty")
def _filled(call: Call) -> Value:
    """Alike everywhere: as wide as what it meets, if the code makes it so (found by running)."""
    return Shape(tuple(call.terms.fresh(size) for size in call.out_sizes()))


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "_reshape_alias", "view_copy")
def _view(call: Call) -> Value:
    x, sizes = call.shape("self", "input"), call.out_sizes()
    return Shape(tuple(reshaped(call.terms, list(x.dims), sizes)))


def reshaped(terms: Terms, dims: list[Dim], sizes: tuple[int, ...]) -> list[Dim]:
    """Split dimensions into their common factors, and join these to the new ones."""
    out: list[Dim] = []
    old = [dim for dim in dims if len(dim) > 1]
    wanted = list(sizes)
    while wanted:
        if wanted[0] == 1:
            wanted.pop(0)
            out.append(pinned(1))
            continue
        taken, made = [old.pop(0)], [wanted.pop(0)]
        while (have := prod(map(len, taken))) != (want := prod(made)):
            if have < want:
                taken.append(old.pop(0))
            else:
                made.append(wanted.pop(0))
        out.extend(_regrouped(terms, taken, made))
    return out


def _regrouped(terms: Terms, dims: list[Dim], sizes: list[int]) -> list[Dim]:
    parts = _common_factors([len(dim) for dim in dims], sizes)
    if parts is None:
        for dim in dims:
            terms.pin(dim)
        return [pinned(size) for size in sizes]
    factors: list[Dim] = []
    for dim, own in zip(dims, parts[0], strict=True):
        factors.extend(terms.split(dim, own))
    out: list[Dim] = []
    for own in parts[1]:
        out.append(terms.merge([factors.pop(0) for _ in own]))
    return out


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


@rule("permute")
def _permute(call: Call) -> Value:
    x = call.shape("self", "input")
    return Shape(tuple(x.dims[d] for d in call.args["dims"]))


@rule("transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint")
def _transpose(call: Call) -> Value:
    x = list(call.shape("self", "input").dims)
    names = [n for n in ("dim0", "dim1", "axis0", "axis1") if n in call.args]
    a, b = (call.args[n] for n in names[:2]) if names else (-1, -2 if len(x) > 1 else -1)
    x[a], x[b] = x[b], x[a]
    return Shape(tuple(x))


@rule("movedim", "moveaxis")
def _movedim(call: Call) -> Value:
    x = list(call.shape("self").dims)
    source, target = call.args["source"], call.args["destination"]
    if not isinstance(source, int) and len(source) != 1:
        return call.pin_all()
    a, b = (s if isinstance(s, int) else s[0] for s in (source, target))
    x.insert(b % len(x), x.pop(a))
    return Shape(tuple(x))


@rule("squeeze", "unsqueeze")
def _squeeze(call: Call) -> Value:
    """Only dimensions of size 1 come or go, and these carry no units."""
    rest = [dim for dim in call.shape("self").dims if len(dim) > 1]
    return Shape(tuple(pinned(1) if size == 1 else rest.pop(0) for size in call.out_sizes()))


@rule("expand", "expand_as", "broadcast_to")
def _expand(call: Call) -> Value:
    x, sizes = call.shape("self"), call.out_sizes()
    own = (*(pinned(1) for _ in range(len(sizes) - len(x.dims))), *x.dims)
    other = call.maybe("other")
    dims: list[Dim] = []
    for d, (dim, size) in enumerate(zip(own, sizes, strict=True)):
        grown = other.dims[d] if other is not None else call.terms.fresh(size)
        dims.append(dim if len(dim) == size else grown)
    return Shape(tuple(dims))


@rule("repeat", "tile")
def _repeat(call: Call) -> Value:
    x, times = call.shape("self"), list(call.args.get("repeats", call.args.get("dims", [])))
    own = [*(pinned(1) for _ in range(len(times) - len(x.dims))), *x.dims]
    times = [1] * (len(own) - len(times)) + times
    dims = [dim * n if len(dim) > 1 or n == 1 else call.terms.fresh(n) for dim, n in zip(own, times, strict=True)]
    return Shape(tuple(dims))


@rule("cat", "concat", "concatenate")
def _cat(call: Call) -> Value:
    shapes, place = [s for s in call.args["tensors"] if len(s.dims) > 1 or s.sizes != (0,)], call.args.get("dim", 0)
    rank = len(shapes[0].dims)
    place %= rank
    joined: Dim = [term for shape in shapes for term in shape.dims[place]]
    others = [Shape(tuple(pinned(1) if d == place else dim for d, dim in enumerate(s.dims))) for s in shapes]
    dims = broadcast(call.terms, others)
    dims[place] = joined
    return Shape(tuple(dims))


@rule("stack")
def _stack(call: Call) -> Value:
    shapes = call.args["tensors"]
    dims = broadcast(call.terms, shapes)
    place = call.args.get("dim", 0) % (len(dims) + 1)
    dims.insert(place, pinned(len(shapes)))
    return Shape(tuple(dims))


@rule("chunk", "split", "split_with_sizes", "tensor_split", "unsafe_chunk", "unsafe_split")
def _parts(call: Call) -> Value:
    """Parts of equal size lose the same units: they stay parts of equal size, and code that counts parts stays right."""
    x, place = call.shape("self"), call.args.get("dim", 0)
    sizes = [sizes_of_part[place] for sizes_of_part in (tuple(v.shape) for v in call.node.meta["val"])]
    dim = x.dims[place]
    if len(set(sizes)) == 1 and len(sizes) > 1:
        call.terms.tie_inside(dim, len(sizes))
    parts: list[Value] = []
    start = 0
    for size in sizes:
        own = list(x.dims)
        own[place] = dim[start : start + size]
        parts.append(Shape(tuple(own)))
        start += size
    return parts


@rule("slice", "narrow")
def _slice(call: Call) -> Value:
    """Which units it takes is known; whether the code still takes them when some are gone is found by running."""
    x, place = call.shape("self"), call.args.get("dim", 0)
    dim, own = x.dims[place], list(x.dims)
    start, end = call.args.get("start"), call.args.get("end")
    if "length" in call.args:
        end = start + call.args["length"]
    own[place] = dim[slice(start, end, call.args.get("step", 1))]
    return Shape(tuple(own))


@rule("select", "unbind")
def _select(call: Call) -> Value:
    x, place = call.shape("self"), call.args.get("dim", 0)
    call.terms.pin(x.dims[place], "one of it is taken by number")
    own = list(x.dims)
    size = len(own.pop(place))
    return Shape(tuple(own)) if call.name == "select" else [Shape(tuple(own))] * size


@rule("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(call: Call) -> Value:
    """Channels go with all the pixels they are made of, or all that are made of them."""
    x, sizes = call.shape("self"), call.out_sizes()
    for dim in x.dims[-2:]:
        call.terms.pin(dim, "a picture's size")
    few, many = sorted((len(x.dims[-3]), sizes[-3]))
    if call.name == "pixel_shuffle":
        channels, pixels = call.terms.split(x.dims[-3], (few, many // few))
        call.terms.pin(pixels, "a picture's size")
    else:
        channels = call.terms.merge((x.dims[-3], pinned(many // few)))
    return Shape((*x.dims[:-3], channels, *(pinned(size) for size in sizes[-2:])))


@rule("glu")
def _glu(call: Call) -> Value:
    x, place = call.shape("self"), call.args.get("dim", -1)
    own = list(x.dims)
    own[place] = call.terms.tie_inside(own[place], 2)
    return Shape(tuple(own))


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def _pad(call: Call) -> Value:
    x, pads = call.shape("self"), list(call.args.get("pad", call.args.get("padding", [])))
    own = list(x.dims)
    for place in range(len(pads) // 2):
        if pads[2 * place] or pads[2 * place + 1]:
            call.terms.pin(own[-1 - place], "padded")
            own[-1 - place] = pinned(call.out_sizes()[-1 - place])
    return Shape(tuple(own))


@rule(
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_bilinear2d", "upsample_linear1d", "upsample_bicubic2d", "_adaptive_avg_pool2d", "_upsample_nearest_exact2d",
)  # fmt: skip
def _pool(call: Call) -> Value:
    x, sizes = call.shape("self", "input"), call.out_sizes()
    num = int(call.name[-2])
    for dim in x.dims[-num:]:
        call.terms.pin(dim, "a picture's size")
    return Shape((*x.dims[:-num], *(pinned(size) for size in sizes[-num:])))
