"""Floating-point operations of aten operators, from their names and the shapes of their tensors.

A multiply-add counts as two; additions of a bias, softmax and other elementwise work are left out. These are the
field's conventions and those of `torch.utils.flop_counter`; what differs on purpose is said at the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from flatout.errors import UsageError

Shape = tuple[int, ...]


def operator_flop(
    name: str,
    shapes: Sequence[Shape],
    out_shapes: Sequence[Shape] = (),
    *,
    is_transposed: bool = False,
    is_causal: bool = False,
) -> int | None:
    """FLOP of one call; None when there is no formula for this operator, or its shapes do not tell.

    `name` is the aten name in any spelling ('aten.mm', 'aten::mm', 'aten.mm.default', 'mm'); `shapes` are its tensor
    arguments in their order, absent ones left out; `out_shapes` are its results. `is_transposed` tells a transposed
    convolution from an ordinary one; `is_causal` counts only the part of attention that a causal mask keeps, while
    torch's counter counts all of it (so does a model's conventional FLOP count).

    Raises UsageError when shapes do not fit the operator.

    >>> operator_flop("aten.addmm.default", [(3,), (5, 4), (4, 3)])
    120
    >>> operator_flop("aten.relu", [(5, 4)]) is None
    True
    """
    short = short_name(name)
    sized = [tuple(shape) for shape in shapes]
    try:
        if short in _PRODUCTS:
            return _PRODUCTS[short](sized)
        if short in _CONVOLUTIONS:
            is_transposed = is_transposed or short.startswith("conv_transpose")
            return _convolution(sized[0], sized[1], out_shapes[0], is_transposed=is_transposed)
        if short == "convolution_backward":
            return _convolution_backward(sized, out_shapes, is_transposed=is_transposed)
        if short in _ATTENTIONS:
            return _attention(short, sized, is_causal=is_causal)
    except (IndexError, ValueError) as e:
        raise UsageError(f"shapes {sized} -> {list(out_shapes)} do not fit '{name}': {e}") from e
    return None


def short_name(name: str) -> str:
    """The operator's name without library and overload.

    >>> short_name("aten.mm.default"), short_name("aten::mm"), short_name("mm")
    ('mm', 'mm', 'mm')
    """
    parts = name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def matmul_flop(*, rows: int, inner: int, columns: int, batch: int = 1) -> int:
    """`batch` products of (rows x inner) by (inner x columns), as mm_flop and bmm_flop of torch.utils.flop_counter.

    Strictly one less addition per output (2 inner - 1); the field counts 2 inner.

    >>> matmul_flop(rows=2, inner=3, columns=4)
    48
    """
    return 2 * batch * rows * inner * columns


def convolution_flop(x_shape: Shape, weight_shape: Shape, out_shape: Shape, *, is_transposed: bool = False) -> int:
    """A convolution of any number of spatial dimensions; products with padding count, as conv_flop_count of torch.

    Each position of the output (of the input when transposed) meets the whole filter of its group; the weight's second
    dimension holds the channels of one group, so groups need no argument.

    >>> convolution_flop((1, 3, 8, 8), (16, 3, 3, 3), (1, 16, 6, 6))
    31104
    """
    positions = (x_shape if is_transposed else out_shape)[2:]
    return 2 * x_shape[0] * prod(positions) * prod(weight_shape)


def attention_flop(*, batch: int, heads: int, q_len: int, kv_len: int, qk_dim: int, v_dim: int | None = None) -> int:
    """Forward attention: scores and weighted sum, as sdpa_flop_count of torch; softmax is left out.

    `heads` are the query's: grouped keys and values are read by every query head of their group.

    >>> attention_flop(batch=1, heads=1, q_len=2, kv_len=3, qk_dim=4)
    96
    """
    return _attention_products(1, 1, batch * heads * q_len * kv_len, qk_dim, qk_dim if v_dim is None else v_dim)


def attention_backward_flop(
    *, batch: int, heads: int, q_len: int, kv_len: int, qk_dim: int, v_dim: int | None = None
) -> int:
    """Backward of fused attention: the scores once more, and two products for each of the forward's two.

    Five products against the forward's two: 2.5 times, as sdpa_backward_flop_count of torch (FlashAttention, Dao et al.
    2022, section 3.1 recomputes the scores).

    >>> attention_backward_flop(batch=1, heads=1, q_len=2, kv_len=3, qk_dim=4)
    240
    """
    return _attention_products(3, 2, batch * heads * q_len * kv_len, qk_dim, qk_dim if v_dim is None else v_dim)


def causal_pairs(*, q_len: int, kv_len: int) -> int:
    """Pairs of query and key that torch's `is_causal` keeps: key <= query, both counted from the first position.

    >>> causal_pairs(q_len=3, kv_len=3), causal_pairs(q_len=2, kv_len=5), causal_pairs(q_len=5, kv_len=2)
    (6, 3, 9)
    """
    triangle = min(q_len, kv_len)
    return triangle * (triangle + 1) // 2 + max(0, q_len - kv_len) * kv_len


def _attention_products(num_qk: int, num_v: int, pairs: int, qk_dim: int, v_dim: int) -> int:
    return 2 * pairs * (num_qk * qk_dim + num_v * v_dim)


def _mm(a: Shape, b: Shape) -> int:
    (rows, inner), (inner_b, columns) = a, b
    _require_equal("inner dimensions", inner, inner_b)
    return matmul_flop(rows=rows, inner=inner, columns=columns)


def _bmm(a: Shape, b: Shape) -> int:
    (batch, rows, inner), (batch_b, inner_b, columns) = a, b
    _require_equal("batches", batch, batch_b)
    _require_equal("inner dimensions", inner, inner_b)
    return matmul_flop(batch=batch, rows=rows, inner=inner, columns=columns)


def _matmul(a: Shape, b: Shape) -> int:
    """torch.matmul: vectors are promoted, batch dimensions are broadcast."""
    a = (1, *a) if len(a) == 1 else a
    b = (*b, 1) if len(b) == 1 else b
    _require_equal("inner dimensions", a[-1], b[-2])
    num_dims = max(len(a), len(b)) - 2
    pairs = zip(_padded(a[:-2], num_dims), _padded(b[:-2], num_dims), strict=True)
    return matmul_flop(batch=prod(_broadcast(x, y) for x, y in pairs), rows=a[-2], inner=a[-1], columns=b[-1])


def _padded(shape: Shape, num_dims: int) -> Shape:
    return (1,) * (num_dims - len(shape)) + shape


def _broadcast(a: int, b: int) -> int:
    if a != b and 1 not in (a, b):
        raise ValueError(f"sizes {a} and {b} do not broadcast")
    return b if a == 1 else a


def _linear(x: Shape, weight: Shape) -> int:
    columns, inner = weight
    _require_equal("inner dimensions", x[-1], inner)
    return matmul_flop(rows=prod(x[:-1]), inner=inner, columns=columns)


def _convolution(x: Shape, weight: Shape, out: Shape, *, is_transposed: bool) -> int:
    if len(x) == len(weight) - 1:  # conv2d and its like also take a single sample
        x, out = (1, *x), (1, *out)
    _require_equal("numbers of dimensions", len(x), len(weight))
    return convolution_flop(x, weight, out, is_transposed=is_transposed)


def _convolution_backward(shapes: Sequence[Shape], out_shapes: Sequence[Shape], *, is_transposed: bool) -> int:
    """One forward's worth for each gradient that is made, of input and of weight.

    As conv_backward_flop of torch for one group; with groups torch 2.13 counts the weight's gradient `groups` times too
    often, since it takes the input's channels for those of one group. The bias's gradient (one dimension) is a sum.
    """
    grad_out, x, weight = shapes[:3]
    num_gradients = sum(len(shape) > 2 for shape in out_shapes)
    return num_gradients * convolution_flop(x, weight, grad_out, is_transposed=is_transposed)


def _attention(short: str, shapes: Sequence[Shape], *, is_causal: bool) -> int | None:
    is_backward = short.endswith("_backward")
    q, k, v = shapes[1:4] if is_backward else shapes[:3]
    if len(q) != 4 or _is_packed(short, shapes):
        return None  # packed sequences: the lengths are data, not shapes
    if not short.startswith("_scaled"):  # the inner operators take (batch, length, heads, dim)
        q, k, v = ((b, n, t, d) for b, t, n, d in (q, k, v))
    batch, heads, q_len, qk_dim = q
    _, kv_heads, kv_len, _ = k
    _require_equal("query and key dimensions", qk_dim, k[3])
    _require_equal("key and value lengths", kv_len, v[2])
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key heads")
    pairs = causal_pairs(q_len=q_len, kv_len=kv_len) if is_causal else q_len * kv_len
    num_qk, num_v = (3, 2) if is_backward else (1, 1)
    return _attention_products(num_qk, num_v, batch * heads * pairs, qk_dim, v[3])


def _is_packed(short: str, shapes: Sequence[Shape]) -> bool:
    """Whether _efficient_attention_* got offsets of sequences, its only one-dimensional arguments."""
    return short.startswith("_efficient") and any(len(shape) == 1 for shape in shapes)


def _require_equal(what: str, a: int, b: int) -> None:
    if a != b:
        raise ValueError(f"{what} differ: {a} and {b}")


_PRODUCTS: dict[str, Callable[[Sequence[Shape]], int]] = {
    "mm": lambda s: _mm(s[0], s[1]),
    "_int_mm": lambda s: _mm(s[0], s[1]),
    "_scaled_mm": lambda s: _mm(s[0], s[1]),
    "addmm": lambda s: _mm(s[1], s[2]),
    "_addmm_activation": lambda s: _mm(s[1], s[2]),
    "bmm": lambda s: _bmm(s[0], s[1]),
    "baddbmm": lambda s: _bmm(s[1], s[2]),
    "addbmm": lambda s: _bmm(s[1], s[2]),
    # Not in torch's counter: it sees these taken apart, a profile of inference mode sees them whole.
    "mv": lambda s: _matmul(s[0], s[1]),
    "addmv": lambda s: _matmul(s[1], s[2]),
    "dot": lambda s: _matmul(s[0], s[1]),
    "vdot": lambda s: _matmul(s[0], s[1]),
    "matmul": lambda s: _matmul(s[0], s[1]),
    "linear": lambda s: _linear(s[0], s[1]),
}

_CONVOLUTIONS = frozenset(
    (
        "convolution",
        "_convolution",
        "convolution_overrideable",
        "cudnn_convolution",
        "miopen_convolution",
        "mkldnn_convolution",
        "_slow_conv2d_forward",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
    )
)

# All fused kernels behind torch.nn.functional.scaled_dot_product_attention; its 'math' path is seen as bmm.
_ATTENTIONS = frozenset(
    f"{name}{suffix}"
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    for suffix in ("", "_backward")
) | {
    "scaled_dot_product_attention",
    "_flash_attention_forward",
    "_flash_attention_backward",
    "_efficient_attention_forward",
    "_efficient_attention_backward",
}
