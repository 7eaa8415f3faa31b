"""The front door: a product, done the way that was measured to be fastest.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.matmul import choosing, table
from flatout.kernels.matmul.differentiable import needs_gradient, with_gradients
from flatout.kernels.matmul.packing import Packed, matrix_of
from flatout.kernels.matmul.problem import Activation, Precision, Strides, lies_in_pieces, problem_of
from flatout.kernels.matmul.reference import multiplied
from flatout.kernels.matmul.table import Chosen
from flatout.kernels.matmul.way import Runner


def matmul(
    a: Tensor,
    b: Tensor | Packed,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    precision: Precision | None = None,
    out_dtype: torch.dtype | None = None,
    strides: Strides = "contiguous",
) -> Tensor:
    """scale * (activation(a @ b + bias) + residual), the way that this machine's table says is fastest; else the vendor's
    library.

    `a` is (..., M, K), `b` (K, N), `bias` (N,), `residual` (..., M, N), `scale` float32 of one number or one a row.
    `activation` is 'relu', 'silu', 'gelu' or 'gelu_tanh'. `precision='float32'`, for float32 operands on a GPU, allows three
    or six products of a coarser type that together err no more than float32's. `out_dtype` may be of 8 bits, which saturate.
    `strides='any'` allows a result whose rows lie apart. `b` as `Packed` is a matrix that stays the same over many calls:
    copies of it are made once.

    Nothing is measured unasked: `with flatout.kernels.matmul.measuring():` or `flatout matmul`; `choice` tells what runs and
    why. It is differentiable, the gradients' products are chosen alike, and an activation is then a step of its own, since
    its input is kept. Under autocast operands are cast as torch casts them; within torch.compile this is torch's own product.

    >>> matmul(torch.eye(2), torch.tensor([[1.0, -2.0], [3.0, 4.0]]), activation="relu")
    tensor([[1., 0.],
            [3., 4.]])
    """
    if torch.compiler.is_compiling():
        return _composed(a, matrix_of(b), bias, residual, scale, activation=activation, out_dtype=out_dtype or a.dtype)
    source = b.source if isinstance(b, Packed) else b
    is_autocast = torch.is_autocast_enabled("cuda" if a.is_cuda else "cpu")
    if not (is_autocast or needs_gradient(a, source, bias, residual, scale)):
        key = choosing.key_of(a, b, bias, residual, scale, (activation, precision, out_dtype, strides))
        runner = choosing.known(key)
        if runner is not None:  # nothing was looked at but the key: this way is taken each time
            return runner(a, b, bias, residual, scale)
    else:
        key = None
    asked = {"activation": activation, "precision": precision, "out_dtype": out_dtype, "strides": strides}
    return _first(a, b, bias, residual, scale, key, asked)


def choice(a: Tensor, b: Tensor | Packed, *, is_captured: bool = False, **asked: object) -> Chosen:
    """The way that `matmul` of these takes, and why; `is_captured`: in a captured graph. Keywords are `matmul`'s."""
    right = matrix_of(b)
    flat = a.reshape(-1, a.shape[-1])
    problem = problem_of(flat, right, is_kept=b is not right, **asked)  # type: ignore[arg-type]
    return table.choose(problem, is_captured=is_captured)


def _first(
    a: Tensor,
    b: Tensor | Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    key: object,
    asked: dict[str, Any],
) -> Tensor:
    """A call whose runner is not known yet, or which is differentiated."""
    if a.dim() < 2:
        raise UsageError(f"a is {tuple(a.shape)}; give (..., M, K), as `a.unsqueeze(0)`")
    if torch.is_autocast_enabled(a.device.type):
        a, b, bias, residual = _autocast(a, b, bias, residual)
    if needs_gradient(a, matrix_of(b), bias, residual, scale):
        return _differentiable(a, b, bias, residual, scale, asked)
    runner = _whole(a, b, bias, residual, scale, asked)
    if key is not None:
        choosing.know(key, runner)
    return runner(a, b, bias, residual, scale)


def _whole(
    a: Tensor,
    b: Tensor | Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    asked: dict[str, Any],
) -> Runner:
    """A runner for operands of this form: of more than two dimensions, and copied first where neither rows nor columns are
    whole."""
    left, right, rows = _flat(a), matrix_of(b), _flat(residual)
    is_plain = left is a and rows is residual and _row(bias) is bias and _row(scale) is scale
    b = b if lies_in_pieces(right) else right.contiguous()
    right = matrix_of(b)
    assert left is not None
    problem = problem_of(left, right, bias=bias, residual=rows, scale=scale, is_kept=b is not right, **asked)
    runner = choosing.runner_with_copies(problem)
    copies_b = right is not b and not isinstance(b, Packed)
    if is_plain and not copies_b:
        return runner
    shape = (*a.shape[:-1], right.shape[1])

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        left, rows = _flat(a), _flat(residual)
        assert left is not None
        right = matrix_of(b).contiguous() if copies_b else b
        return runner(left, right, _row(bias), rows, _row(scale)).view(shape)

    return run


def _flat(x: Tensor | None) -> Tensor | None:
    """(rows, columns), copied where neither lies in one piece; x itself where nothing is to be done."""
    if x is None:
        return None
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if lies_in_pieces(flat) else flat.contiguous()


def _row(x: Tensor | None) -> Tensor | None:
    """x in one piece."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def _differentiable(
    a: Tensor,
    b: Tensor | Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    asked: dict[str, Any],
) -> Tensor:
    left, right, rows = _flat(a), matrix_of(b), _flat(residual)
    if not lies_in_pieces(right):
        b = right = right.contiguous()
    assert left is not None
    problem = problem_of(left, right, bias=bias, residual=rows, scale=scale, is_kept=b is not right, **asked)
    multiply = partial(matmul, precision=asked["precision"])
    sides = (_row(bias), rows, _row(scale))
    out = with_gradients(problem, left, b, right, *sides, runner_of=choosing.runner_of, multiply=multiply)
    return out if a.dim() == 2 else out.view(*a.shape[:-1], right.shape[1])


def _composed(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *,
    activation: Activation | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """In torch's operators, for torch.compile to fuse."""
    rows = None if residual is None else residual.reshape(-1, residual.shape[-1])
    flat = a.reshape(-1, a.shape[-1])
    out = multiplied(flat, b, bias=bias, activation=activation, residual=rows, scale=scale, out_dtype=out_dtype)
    return out.view(*a.shape[:-1], b.shape[-1])


def _autocast(
    a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None
) -> tuple[Tensor, Tensor | Packed, Tensor | None, Tensor | None]:
    """float32 operands in autocast's type; a weight that is cast at each call is not kept."""
    dtype = torch.get_autocast_dtype(a.device.type)
    cast = [t if t is None or t.dtype != torch.float32 else t.to(dtype) for t in (a, matrix_of(b), bias, residual)]
    left, right = cast[0], cast[1]
    assert left is not None and right is not None
    return left, b if right is matrix_of(b) else right, cast[2], cast[3]
