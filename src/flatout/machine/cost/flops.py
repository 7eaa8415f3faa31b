"""Floating-point operations of aten operators, from their names and the shapes of their tensors.

A multiply-add counts as two; additions of a bias, softmax and other elementwise work are left out. These are the
field's conventions and those of `torch.utils.flop_counter`; what differs on purpose is said at the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from flatout.core.errors import UsageError

Shape = tuple[int, ...]


def operator_flop(
    name: str,
    shapes: Sequence[Shape],
    out_shapes: Sequence[Shape] = (),
    *,
    is_transposed: bool = False,
) -> int | None:
    """FLOP of one call; None when there is no formula for this operator, or its shapes do not tell.

    `name` is the aten name in any spelling ('aten.mm', 'aten::mm', 'aten.mm.default', 'mm'); `shapes` are its tensor
    arguments in their order, absent ones left out; `out_shapes` are its results. `is_transposed` tells a transposed
    convolution from an ordinary one. All of attention counts, whatever a mask leaves out, as in torch's counter.

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
            formula, first = _PRODUCTS[short]
            return formula(sized[first], sized[first + 1])
        if short in _CONVOLUTIONS:
            is_transposed = is_transposed or short.startswith("conv_transpose")
            return _convolution(sized[0], sized[1], out_shapes[0], is_transposed=is_transposed)
        if short == "convolution_backward":
            return _convolution_backward(sized, out_shapes, is_transposed=is_transposed)
        if short in _ATTENTIONS:
            return _attention(short, sized)
        if short in _RECURRENT:
            return _recurrent(short, sized)
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
    """FLOP of torch.matmul: vectors are promoted, batch dimensions are broadcast."""
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


def _recurrent(short: str, shapes: Sequence[Shape]) -> int:
    """A call of LSTM, GRU or RNN layers: each weight matrix meets each position once, and twice in the backward.

    oneDNN's call has one layer's two matrices after the input, cuDNN's those of all layers before the states, which have three
    dimensions. Rows of a packed sequence are its positions.
    """
    states = next((n for n, shape in enumerate(shapes[1:], start=1) if len(shape) == 3), len(shapes))
    weights = shapes[1:3] if short.startswith("mkldnn") else shapes[1:states]
    positions = prod(shapes[0][:-1])
    forward = sum(matmul_flop(rows=positions, inner=w[1], columns=w[0]) for w in weights if len(w) == 2)
    return 2 * forward if short.endswith("backward") else forward


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


def _attention(short: str, shapes: Sequence[Shape]) -> int | None:
    """Forward: scores and weighted sum, as sdpa_flop_count of torch; softmax is left out.

    Backward: the scores once more (FlashAttention, Dao et al. 2022, section 3.1), and two products for each of the forward's two:
    2.5 times, as sdpa_backward_flop_count. Grouped keys and values are read by every query head of their group.
    """
    is_backward = short.endswith("_backward")
    q, k, v = shapes[1:4] if is_backward else shapes[:3]
    # _efficient_attention_* gets the offsets of packed sequences, its only one-dimensional arguments
    has_offsets = short.startswith("_efficient") and any(len(shape) == 1 for shape in shapes)
    if len(q) != 4 or has_offsets:
        return None  # packed sequences: the lengths are data, not shapes
    if "scaled_dot_product" not in short:  # the inner operators take (batch, length, heads, dim)
        q, k, v = ((b, n, t, d) for b, t, n, d in (q, k, v))
    batch, heads, q_len, qk_dim = q
    _, kv_heads, kv_len, _ = k
    _require_equal("query and key dimensions", qk_dim, k[3])
    _require_equal("key and value lengths", kv_len, v[2])
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key heads")
    num_qk, num_v = (3, 2) if is_backward else (1, 1)
    return 2 * batch * heads * q_len * kv_len * (num_qk * qk_dim + num_v * v[3])


def _require_equal(what: str, a: int, b: int) -> None:
    if a != b:
        raise ValueError(f"{what} differ: {a} and {b}")


_PRODUCTS: dict[str, tuple[Callable[[Shape, Shape], int], int]] = {
    **dict.fromkeys(("mm", "_int_mm", "_scaled_mm"), (_mm, 0)),
    **dict.fromkeys(("addmm", "_addmm_activation"), (_mm, 1)),
    "bmm": (_bmm, 0),
    **dict.fromkeys(("baddbmm", "addbmm"), (_bmm, 1)),
    # Not in torch's counter: it sees these taken apart, a profile of inference mode sees them whole.
    **dict.fromkeys(("mv", "dot", "vdot", "matmul"), (_matmul, 0)),
    "addmv": (_matmul, 1),
    "linear": (_linear, 0),
}
"""Formulas of products, and which tensor argument is the first factor."""

_CONVOLUTION_NAMES = """
convolution _convolution convolution_overrideable cudnn_convolution miopen_convolution mkldnn_convolution
_slow_conv2d_forward conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
"""
_CONVOLUTIONS = frozenset(_CONVOLUTION_NAMES.split())

# All fused kernels behind torch.nn.functional.scaled_dot_product_attention; its 'math' path is seen as bmm.
_FUSED = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
_RECURRENT = frozenset(
    f"{name}{suffix}" for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn") for suffix in ("", "_backward")
)
_ATTENTIONS = frozenset(
    [f"_scaled_dot_product_{kind}{suffix}" for kind in _FUSED for suffix in ("", "_backward")]
    + [f"_{kind}_attention_{direction}" for kind in ("flash", "efficient") for direction in ("forward", "backward")]
    + ["scaled_dot_product_attention"]
)
