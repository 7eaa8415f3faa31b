"""Operators that drawn models are made of: each draws its sizes for the tensor that it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = (1, 2, 3, 5, 8, 16, 17, 33)


class Step(nn.Module):
    """One operator over tensors of the pool."""

    def __init__(self, label: str, call: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.label, self.call, self.parts = label, call, nn.ModuleList(parts)

    def forward(self, *xs: Tensor) -> Tensor:
        found: Tensor = self.call(*self.parts, *xs)
        return found


def ranked(x: Tensor, rank: int) -> Tensor:
    """With so many dimensions: the first become one, or more of one element come."""
    while x.dim() < rank:
        x = x.unsqueeze(0)
    return x.flatten(0, x.dim() - rank) if x.dim() > rank else x


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The first numbers of x in another shape, zeros behind them."""
    flat, n = x.reshape(-1), prod(shape)
    flat = flat[:n] if flat.numel() >= n else F.pad(flat, (0, n - flat.numel()))
    return flat.reshape(shape)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f.__name__: f
        for f in (
            torch.exp,
            torch.sigmoid,
            torch.tanh,
            torch.erf,
            torch.sin,
            torch.cos,
            torch.atan,
            torch.relu,
            F.silu,
            F.mish,
            F.hardsigmoid,
            F.hardswish,
            torch.abs,
            torch.neg,
            F.softplus,
            F.elu,
            F.selu,
            F.celu,
            F.relu6,
            F.softsign,
            F.tanhshrink,
            F.logsigmoid,
            torch.expm1,
            torch.square,
        )
    },
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "leaky": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
    "softplus2": lambda x: F.softplus(x, 2.0, 1.0),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x * x + 0.5),
    "log": lambda x: torch.log(x.abs() + 0.5),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log2": lambda x: torch.log2(x * x + 1),
    "log10": lambda x: torch.log10(x * x + 1),
    "recip": lambda x: 1 / (x.abs() + 0.7),
    "pow3": lambda x: x**3,
    "powf": lambda x: x.abs() ** 1.3,
    "base": lambda x: 1.5**x,
    "exp2": torch.exp2,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "floor": lambda x: torch.floor(x * 1.7 + 0.3),
    "ceil": lambda x: torch.ceil(x * 1.7),
    "round": lambda x: torch.round(x * 2.3),
    "trunc": lambda x: torch.trunc(x * 3.1),
    "sign": torch.sign,
    "fmod": lambda x: torch.fmod(x, 0.6),
    "remainder": lambda x: torch.remainder(x, -0.6),
    "clamp": lambda x: x.clamp(-0.4, 0.9),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "clamp_max": lambda x: x.clamp(max=0.1),
    "where": lambda x: torch.where(x > 0.1, x, 2 * x - 1),
    "masked": lambda x: x.masked_fill(x < -0.3, 0.25),
    "nan_to_num": torch.nan_to_num,
    "step": lambda x: (x >= 0.2).to(x.dtype) * x,
    "mask_sum": lambda x: ((x > 0) + (x > 0.5)).to(x.dtype),
    "logic": lambda x: torch.where((x > 0) & ~(x > 1) | (x < -1), x, -x),
    "rsub": lambda x: 1.5 - x,
    "alpha": lambda x: torch.add(x, x * 0.3, alpha=2.0),
    "to_int": lambda x: (x * 3).long().to(x.dtype),
    "lerp": lambda x: torch.lerp(x, x * x, 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.2),
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 0.6),
    "min": torch.minimum,
    "max": torch.maximum,
    "where2": lambda a, b: torch.where(a > b, a, 0.5 * b),
    "atan_div": lambda a, b: a * torch.rsqrt(a * a + b * b + 0.3),
    "ge": lambda a, b: (a >= b).to(a.dtype),
    "pow2": lambda a, b: (a.abs() + 0.2) ** b.clamp(-2, 2),
    "glu": lambda a, b: a * torch.sigmoid(b),
}
_REDUCE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "std": lambda x, d, keepdim: (x.var(d, unbiased=False, keepdim=keepdim) + 0.1).sqrt(),
    "norm": lambda x, d, keepdim: (x * x).sum(d, keepdim=keepdim).add(0.1).sqrt(),
    "logsumexp": torch.logsumexp,
    "any": lambda x, d, keepdim: (x > 0.5).any(d[0], keepdim=keepdim).to(x.dtype),
    "all": lambda x, d, keepdim: (x > -1).all(d[0], keepdim=keepdim).to(x.dtype),
    "argmax": lambda x, d, keepdim: x.argmax(d[0], keepdim=keepdim).to(x.dtype),
    "prod": lambda x, d, keepdim: (x * 0.5 + 1).tanh().prod(d[0], keepdim=keepdim),
}

Factory = Callable[[Random, Tensor], Step]


def _dim(draw: Random, x: Tensor) -> int:
    return draw.randrange(-x.dim(), x.dim())


def _unary(draw: Random, x: Tensor) -> Step:
    name = draw.choice(list(_UNARY))
    return Step(name, _UNARY[name])


def _reduction(draw: Random, x: Tensor) -> Step:
    name, keep = draw.choice(list(_REDUCE)), draw.random() < 0.5
    dims = draw.sample(range(x.dim()), draw.randint(1, x.dim()))
    return Step(f"{name} {dims} {keep}", lambda x: _REDUCE[name](x, dims, keepdim=keep))


def _all_reduction(draw: Random, x: Tensor) -> Step:
    call = draw.choice((torch.sum, torch.mean, torch.amax, torch.max, torch.min, lambda x: x.argmin().to(x.dtype)))
    return Step("reduce all", call)


def _softmax(draw: Random, x: Tensor) -> Step:
    dim, call = _dim(draw, x), draw.choice((torch.softmax, torch.log_softmax))
    return Step(f"softmax {dim}", lambda x: call(x, dim))


def _linear(draw: Random, x: Tensor) -> Step:
    n, bias = draw.choice(SIZES), draw.random() < 0.7
    return Step(f"linear {n}", lambda m, x: m(x), nn.Linear(x.shape[-1], n, bias))


def _einsum(draw: Random, x: Tensor) -> Step:
    kind = draw.choice(("mk,nk->mn", "mk,mn->kn", "mk,mk->m", "mk,nk->nm"))
    return Step(f"einsum {kind}", lambda x: torch.einsum(kind, ranked(x, 2), ranked(x * 0.5, 2)))


def _bmm(draw: Random, x: Tensor) -> Step:
    kind = draw.choice((0, 1, 2))
    calls = (
        lambda x: torch.bmm(x, x.transpose(1, 2)),
        lambda x: x.transpose(1, 2) @ x,
        lambda x: torch.baddbmm(x @ x.mT, x, x.mT),
    )
    return Step(f"bmm {kind}", lambda x: calls[kind](ranked(x, 3)) * 0.3)


def _addmm(draw: Random, x: Tensor) -> Step:
    n = draw.choice(SIZES)
    w = nn.Linear(ranked(x, 2).shape[1], n)
    return Step(f"addmm {n}", lambda m, x: torch.addmm(m.bias, ranked(x, 2), m.weight.t()), w)


def _conv1d(draw: Random, x: Tensor) -> Step:
    c = ranked(x, 3).shape[1]
    groups = draw.choice([g for g in range(1, c + 1) if c % g == 0])
    out = groups * draw.choice((1, 1, 2, 5)) if groups > 1 else draw.choice(SIZES)
    k, stride, dilation = draw.randint(1, 4), draw.randint(1, 2), draw.randint(1, 3)
    m = nn.Conv1d(c, out, k, stride, 0, dilation, groups, draw.random() < 0.7)
    pads = draw.choice((((k - 1) * dilation, 0), (k * dilation, k), ((k - 1) * dilation, 2)))
    if draw.random() < 0.3:
        m = nn.Conv1d(c, out, k, stride, (k - 1) * dilation, dilation, groups)
        pads = (0, 0)
    return Step(f"conv1d {out} {k} {stride} {dilation} {groups} {pads}", lambda m, x: m(F.pad(ranked(x, 3), pads)), m)


def _conv2d(draw: Random, x: Tensor) -> Step:
    c = ranked(x, 4).shape[1]
    groups = draw.choice((1, 1, c))
    k, stride, dilation = (draw.randint(1, 3), draw.randint(1, 3)), draw.randint(1, 2), draw.randint(1, 2)
    pad = tuple((n - 1) * dilation for n in k)
    m = nn.Conv2d(c, c * 2 if groups > 1 else draw.choice((1, 3, 17)), k, stride, pad, dilation, groups)
    return Step(f"conv2d {k} {stride} {dilation} {groups}", lambda m, x: m(ranked(x, 4)), m)


def _norm(draw: Random, x: Tensor) -> Step:
    count = draw.randint(1, min(2, x.dim()))
    shape = tuple(x.shape[-count:])
    kind = draw.choice(("layer", "layer", "plain", "bias", "rms", "batch"))
    if kind == "batch":
        m = nn.BatchNorm1d(ranked(x, 3).shape[1])
        m.running_mean.normal_()  # type: ignore[union-attr]
        m.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        return Step("batch_norm", lambda m, x: m(ranked(x, 3)), m)
    if kind == "bias":
        held = nn.ParameterList([torch.randn(shape)])
        return Step("layer_norm with a bias alone", lambda p, x: F.layer_norm(x, shape, None, p[0]), held)
    if kind == "rms":
        return Step("rms_norm", lambda m, x: m(x), nn.RMSNorm(shape, eps=0.1))
    m = nn.LayerNorm(shape, eps=0.1, elementwise_affine=kind == "layer")
    for p in m.parameters():
        nn.init.normal_(p)
    return Step(f"layer_norm {shape}", lambda m, x: m(x), m)


def _group_norm(draw: Random, x: Tensor) -> Step:
    c = ranked(x, 3).shape[1]
    return Step(
        "group_norm", lambda m, x: m(ranked(x, 3)), nn.GroupNorm(draw.choice([g for g in (1, c) if c % g == 0]), c, 0.1)
    )


def _cell(draw: Random, x: Tensor) -> Step:
    n, kind = draw.choice(SIZES), draw.choice((nn.GRUCell, nn.LSTMCell, nn.RNNCell))
    cell = kind(ranked(x, 2).shape[1], n, draw.random() < 0.7)

    def call(m: nn.Module, x: Tensor) -> Tensor:
        rows = ranked(x, 2)
        h = fitted(rows * 0.4, (rows.shape[0], n))
        if kind is nn.LSTMCell:
            return torch.cat(m(rows, (h, h * 0.5)), 1)
        return m(rows, h)  # type: ignore[no-any-return]

    return Step(f"{kind.__name__} {n}", call, cell)


def _recurrent(draw: Random, x: Tensor) -> Step:
    kind = draw.choice((nn.GRU, nn.LSTM, nn.RNN))
    n, layers, both, first = draw.choice((1, 3, 17)), draw.randint(1, 2), draw.random() < 0.4, draw.random() < 0.5
    m = kind(ranked(x, 3).shape[2], n, layers, batch_first=first, bidirectional=both)
    return Step(f"{kind.__name__} {n} {layers} {both} {first}", lambda m, x: m(ranked(x, 3)[:4, :4])[0], m)


def _attention(draw: Random, x: Tensor) -> Step:
    shape = ranked(x, 3).shape
    heads = draw.choice([h for h in (1, 2, 4) if shape[2] % h == 0])
    kind = draw.choice(("sdpa", "causal", "mha", "layer", "masked"))
    if kind in ("sdpa", "causal"):
        return Step(
            kind,
            lambda x: F.scaled_dot_product_attention(
                ranked(x, 3), ranked(x, 3) * 0.5, ranked(x, 3), is_causal=kind == "causal"
            ),
        )
    if kind == "masked":
        mask = torch.ones(shape[1], shape[1]).tril() > 0
        return Step(
            kind,
            lambda x: F.scaled_dot_product_attention(ranked(x, 3), ranked(x, 3) * 0.5, ranked(x, 3), attn_mask=mask),
        )
    if kind == "mha":
        m = nn.MultiheadAttention(shape[2], heads, batch_first=True)
        return Step("mha", lambda m, x: m(ranked(x, 3), ranked(x, 3), ranked(x, 3), need_weights=False)[0], m)
    first = draw.random() < 0.5
    layer = nn.TransformerEncoderLayer(
        shape[2], heads, 17, 0.0, draw.choice((F.relu, F.gelu)), batch_first=True, norm_first=first, layer_norm_eps=0.1
    )
    return Step(f"encoder layer {heads} {first}", lambda m, x: m(ranked(x, 3)), layer)


def _embedding(draw: Random, x: Tensor) -> Step:
    rows, n = draw.choice((2, 5, 17)), draw.choice(SIZES)
    return Step(f"embedding {n}", lambda m, x: m((x * 3).long().clamp(0, rows - 1)), nn.Embedding(rows, n))


def _slice(draw: Random, x: Tensor) -> Step:
    dim = _dim(draw, x)
    n = x.shape[dim]
    start, step = draw.randrange(n), draw.choice((1, 1, 2, 3))
    stop = draw.randint(start + 1, n)
    cut = [slice(None)] * x.dim()
    cut[dim] = slice(start - n if draw.random() < 0.3 else start, stop, step)
    return Step(f"slice {cut[dim]} of {dim}", lambda x: x[tuple(cut)])


def _select(draw: Random, x: Tensor) -> Step:
    dim = _dim(draw, x)
    at = draw.randrange(-x.shape[dim], x.shape[dim])
    return Step(f"select {dim} {at}", lambda x: x.select(dim, at))


def _view(draw: Random, x: Tensor) -> Step:
    left, shape = x.numel(), []
    while left > 1 and len(shape) < 3:
        part = draw.choice([d for d in range(1, left + 1) if left % d == 0])
        shape.append(part)
        left //= part
    shape.append(left)
    draw.shuffle(shape)
    return Step(f"reshape {shape}", lambda x: x.reshape(shape))


def _permute(draw: Random, x: Tensor) -> Step:
    dims = draw.sample(range(x.dim()), x.dim())
    return Step(f"permute {dims}", lambda x: x.permute(dims))


def _shuffled(draw: Random, x: Tensor) -> Step:
    dim = _dim(draw, x)
    n = x.shape[dim]
    half, by = (n + 1) // 2, draw.randint(0, n)
    picked = [draw.randrange(-n, n) for _ in range(draw.randint(1, 4))]
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "unsqueeze": lambda x: x.unsqueeze(dim),
        "squeeze": lambda x: x.squeeze(dim),
        "flatten": lambda x: x.flatten(),
        "roll": lambda x: torch.roll(x, by, dim),
        "chunk": lambda x: torch.cat(x.chunk(2, dim)[::-1], dim),
        "split": lambda x: x.split(half, dim)[-1] * 1.5,
        "unbind": lambda x: x.unbind(dim)[0],
        "stack": lambda x: torch.stack((x, x * 0.5, x), dim),
        "cat": lambda x: torch.cat((x, -x, x), dim),
        "repeat": lambda x: torch.cat([x[None]] * 2).expand(2, *x.shape),
        "clone": lambda x: x.clone(),
        "pad": lambda x: F.pad(x, (by, 1), value=0.3),
        "transpose": lambda x: x.transpose(dim, 0),
        "index": lambda x: x.movedim(dim, 0)[picked],
        "index_select": lambda x: x.index_select(dim, torch.tensor([p % n for p in picked])),
        "tile": lambda x: x.repeat(*[1] * x.dim(), 2),
        "index_of": lambda x: x.movedim(dim, 0)[(x.sum() * 3).long().clamp(-n, n - 1)],
    }
    name = draw.choice(list(calls))
    return Step(f"{name} {dim}", calls[name])


def _refused(draw: Random, x: Tensor) -> Step:
    dim = _dim(draw, x)
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "flip": lambda x: x.flip(dim),
        "gather": lambda x: torch.gather(x, dim, (x > 0).long() * 0),
        "cumsum": lambda x: x.cumsum(dim),
        "max of dim": lambda x: x.max(dim)[0],
        "sort": lambda x: x.sort(dim)[0],
        "topk": lambda x: x.topk(1, dim)[0],
        "round": lambda x: torch.round(x, decimals=1),
        "any": lambda x: (x > 0).any().to(x.dtype),
        "prod": lambda x: x.tanh().prod(),
        "mask": lambda x: torch.where(torch.isnan(x), 0.0, x),
        "group_norm": lambda x: F.group_norm(ranked(x, 3), 1),
        "int_sum": lambda x: (x > 0).sum(dim).to(x.dtype),
        "cumprod": lambda x: x.tanh().cumprod(dim),
        "tan": torch.tan,
        "asin": lambda x: torch.asin(x.tanh()),
        "atan2": lambda x: torch.atan2(x, x.abs() + 1),
        "erfinv": lambda x: torch.erfinv(x.tanh() * 0.9),
        "scatter": lambda x: x.index_add(0, torch.tensor([0]), x[:1]),
        "tril": lambda x: ranked(x, 2).tril(),
        "pool": lambda x: F.max_pool1d(ranked(x, 3), 1),
        "mean_pool": lambda x: F.adaptive_avg_pool1d(ranked(x, 3), 1),
        "floor_div": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        "conv_transpose": lambda x: F.conv_transpose1d(
            ranked(x, 3), torch.ones(ranked(x, 3).shape[1], 2, 2, dtype=x.dtype)
        ),
    }
    name = draw.choice(list(calls))
    return Step(f"{name} {dim}", calls[name])


COMMON: tuple[Factory, ...] = (
    _unary,
    _unary,
    _unary,
    _reduction,
    _all_reduction,
    _softmax,
    _linear,
    _linear,
    _einsum,
    _bmm,
    _addmm,
    _conv1d,
    _conv1d,
    _conv2d,
    _norm,
    _norm,
    _cell,
    _recurrent,
    _attention,
    _attention,
    _embedding,
    _slice,
    _slice,
    _select,
    _view,
    _permute,
    _shuffled,
    _shuffled,
)
RARE: tuple[Factory, ...] = (_refused, _group_norm)


def _padded(draw: Random, x: Tensor) -> Step:
    pads = [draw.randint(0, 2) for _ in range(4)]
    return Step(f"pad {pads}", lambda x: torch.ops.aten.constant_pad_nd(x, pads, 0.3))


def _split(draw: Random, x: Tensor) -> Step:
    sizes = [x.shape[-1] - 1, 1]
    return Step(f"split {sizes}", lambda x: torch.ops.aten.split_with_sizes(x, sizes, -1)[1] * 1.5)


def _index(draw: Random, x: Tensor) -> Step:
    picked = torch.tensor([draw.randrange(x.shape[1]) for _ in range(4)])
    return Step("index", lambda x: torch.ops.aten.index.Tensor(x, [None, picked]))


def _index_select(draw: Random, x: Tensor) -> Step:
    picked = torch.tensor([draw.randrange(x.shape[1]) for _ in range(4)])
    return Step("index_select", lambda x: torch.index_select(x, 1, picked))


def _squeezed(draw: Random, x: Tensor) -> Step:
    return Step("squeeze", lambda x: torch.ops.aten.squeeze.dims(x.unsqueeze(1), [1]))


def _batch_norm(draw: Random, x: Tensor) -> Step:
    return Step("batch_norm", lambda m, x: m(x), nn.BatchNorm1d(x.shape[1]))


def _layer_norm(draw: Random, x: Tensor) -> Step:
    return Step("layer_norm", lambda m, x: m(x), nn.LayerNorm(x.shape[-1]))


def _where(draw: Random, x: Tensor) -> Step:
    return Step("where", lambda x: torch.where(x > 0.1, x, 0.5 - x))


def _to(draw: Random, x: Tensor) -> Step:
    return Step("to", lambda x: torch.ops.aten.to.dtype(x > 0, torch.float32))


def _any(draw: Random, x: Tensor) -> Step:
    dim = _dim(draw, x)
    return Step(f"any {dim}", lambda x: (x > 0.5).any(dim).to(x.dtype))


def _any_of_dims(draw: Random, x: Tensor) -> Step:
    return Step("any of dims", lambda x: torch.ops.aten.any.dims(x > 0.5, [0, 2]).to(x.dtype))


_ATEN = torch.ops.aten
BY_HAND: dict[object, Factory] = {
    _ATEN.mm.default: _einsum,
    _ATEN.addmm.default: _addmm,
    _ATEN.bmm.default: _bmm,
    _ATEN.convolution.default: _conv1d,
    _ATEN.embedding.default: _embedding,
    _ATEN.native_layer_norm.default: _layer_norm,
    _ATEN._native_batch_norm_legit_no_training.default: _batch_norm,
    _ATEN.constant_pad_nd.default: _padded,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.index.Tensor: _index,
    _ATEN.index_select.default: _index_select,
    _ATEN.squeeze.dims: _squeezed,
    _ATEN.where: _where,
    _ATEN.to: _to,
    _ATEN.any.dim: _any,
    _ATEN.any.dims: _any_of_dims,
}
"""Steps for operators whose arguments cannot be drawn by their schema; the others are drawn in test_operators.py."""
