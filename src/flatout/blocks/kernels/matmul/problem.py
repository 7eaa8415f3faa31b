"""One product as its implementations see it: sizes, types, the layout of the operands in memory, and what follows the sum.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from flatout.core.errors import UsageError

Activation = Literal["relu", "silu", "gelu", "gelu_tanh"]
Precision = Literal["float32"]
Strides = Literal["contiguous", "any"]
ACTIVATIONS: Final = ("relu", "silu", "gelu", "gelu_tanh")
ROW_BYTES: Final = 16
"""Rows that begin at multiples of it can be read by the widest loads, and by the tensor memory accelerator, which needs it (CUDA
driver API, cuTensorMapEncodeTiled: globalStrides)."""


class Epilogue(NamedTuple):
    """What follows the sum, in this order: + bias, the activation, + residual, * scale."""

    has_bias: bool = False
    activation: Activation | None = None
    has_residual: bool = False
    scale: Literal["tensor", "rows"] | None = None

    def __str__(self) -> str:
        parts = ("bias" * self.has_bias, self.activation or "", "residual" * self.has_residual)
        return "+".join([*filter(None, parts), *([f"scale by {self.scale}"] if self.scale else [])])


class MatmulProblem(NamedTuple):
    """The product of a (M, K) and b (K, N), as far as the time that it takes depends on it.

    `a_rows` and `b_rows`: rows are contiguous, and not columns; `a_stride` and `b_stride` are the numbers from one row (or
    column) to the next. `is_constant`: b stays the same over many calls (a weight), so that what is derived from it once costs
    nothing per call. `strides`: what the result's may be.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    a_rows: bool
    b_rows: bool
    a_stride: int
    b_stride: int
    device: torch.device
    is_constant: bool = False
    epilogue: Epilogue = Epilogue()
    precision: Precision | None = None
    strides: Strides = "contiguous"

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @property
    def layout(self) -> str:
        """The layout of a and b as in BLAS: n for contiguous rows, t for contiguous columns."""
        return ("n" if self.a_rows else "t") + ("n" if self.b_rows else "t")

    @property
    def flop(self) -> float:
        """Floating-point operations: a multiply-add counts as two; what follows the sum is left out."""
        return 2.0 * self.m * self.n * self.k

    @property
    def traffic_bytes(self) -> float:
        """Bytes moved when each operand is read once and the result is written once."""
        size = self.dtype.itemsize
        outs = self.m * self.n * (self.out_dtype.itemsize + self.epilogue.has_residual * size)
        return float((self.m * self.k + self.k * self.n) * size + outs)

    def __str__(self) -> str:
        """The key of the problem in a device's table."""
        words = [f"{self.m}x{self.n}x{self.k}", name_of(self.dtype), self.layout]
        if self.a_stride != (self.k if self.a_rows else self.m):
            words.append(f"a-stride={self.a_stride}")
        if self.b_stride != (self.n if self.b_rows else self.k):
            words.append(f"b-stride={self.b_stride}")
        words += ["constant"] * self.is_constant + [str(self.epilogue)] * (self.epilogue != Epilogue())
        words += [f"precision={self.precision}"] * (self.precision is not None)
        words += [f"out={name_of(self.out_dtype)}"] * (self.out_dtype != self.dtype)
        return " ".join([*words, *["strides=any"] * (self.strides == "any")])


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without the module.

    >>> name_of(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def matmul_problem(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    activation: Activation | None = None,
    precision: Precision | None = None,
    out_dtype: torch.dtype | None = None,
    strides: Strides = "contiguous",
    is_constant: bool = False,
) -> MatmulProblem:
    """The problem of (M, K) @ (K, N), checked.

    Raises UsageError for sizes, types and devices that do not fit one another.
    """
    _check_operands(a, b)
    (m, k), n = a.shape, b.shape[1]
    _check_sides(a, n, bias=bias, residual=residual, scale=scale)
    if activation is not None and activation not in ACTIVATIONS:
        raise UsageError(f"activation '{activation}' is not known; give one of {', '.join(ACTIVATIONS)} or None")
    if precision not in (None, "float32"):
        raise UsageError(f"precision '{precision}' is not known; give 'float32' or None")
    if precision == "float32" and a.dtype != torch.float32:
        raise UsageError(f"precision 'float32' is for float32 operands, these are {name_of(a.dtype)}; leave it out")
    by: Literal["tensor", "rows"] | None = None
    if scale is not None:
        by = "tensor" if scale.numel() == 1 and m != 1 else "rows"
    a_rows, b_rows = a.stride(1) == 1, b.stride(1) == 1 and b.stride(0) >= n
    strides_ab = a.stride(0 if a_rows else 1), b.stride(0 if b_rows else 1)
    return MatmulProblem(
        *(m, n, k, a.dtype, out_dtype or a.dtype, a_rows, b_rows, *strides_ab, a.device),
        is_constant=is_constant,
        epilogue=Epilogue(bias is not None, activation, residual is not None, by),
        precision=precision,
        strides=strides,
    )


def plain_problem(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    layout: str = "nn",
    is_constant: bool = False,
    epilogue: Epilogue | None = None,
    precision: Precision | None = None,
) -> MatmulProblem:
    """A problem of these sizes whose operands have no gaps between rows.

    Raises UsageError for a layout that is not two letters of n and t.
    """
    if layout not in ("nn", "nt", "tn", "tt"):
        raise UsageError(f"layout '{layout}' is not known; give nn, nt, tn or tt, as in BLAS: a's, then b's")
    if min(m, n, k) < 1:
        raise UsageError(f"sizes {m}x{n}x{k} must be 1 or more")
    a_rows, b_rows = (letter == "n" for letter in layout)
    strides_ab = k if a_rows else m, n if b_rows else k
    return MatmulProblem(
        *(m, n, k, dtype, dtype, a_rows, b_rows, *strides_ab, torch.device(device)),
        is_constant=is_constant,
        epilogue=epilogue or Epilogue(),
        precision=precision,
    )


def lies_in_pieces(x: Tensor) -> bool:
    """Whether the rows or the columns of a matrix are contiguous each, without overlap."""
    rows, cols = x.shape
    return (x.stride(1) == 1 and x.stride(0) >= cols) or (x.stride(0) == 1 and x.stride(1) >= rows)


def _check_operands(a: Tensor, b: Tensor) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise UsageError(f"cannot multiply {tuple(a.shape)} and {tuple(b.shape)}; give (..., M, K) and (K, N)")
    if a.dtype != b.dtype or a.device != b.device:
        kinds = [f"{name_of(x.dtype)} on {x.device}" for x in (a, b)]
        raise UsageError(f"a is {kinds[0]}, b is {kinds[1]}; both must be of one type on one device")
    if not a.dtype.is_floating_point:
        raise UsageError(f"a and b are {name_of(a.dtype)}; a product here is of floating-point numbers")


def _check_sides(a: Tensor, n: int, *, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None) -> None:
    m = a.shape[0]
    for name, side, shapes in (
        ("bias", bias, ((n,),)),
        ("residual", residual, ((m, n),)),
        ("scale", scale, ((), (1,), (m,), (m, 1))),
    ):
        if side is None:
            continue
        if tuple(side.shape) not in shapes:
            raise UsageError(f"{name} is {tuple(side.shape)}; give {' or '.join(map(str, shapes))}")
        if side.device != a.device:
            raise UsageError(f"{name} is on {side.device}, a on {a.device}; both must be on one device")
    if scale is not None and scale.dtype != (torch.float64 if a.dtype == torch.float64 else torch.float32):
        raise UsageError(f"scale is {name_of(scale.dtype)}; give float32, or float64 for operands of it")
