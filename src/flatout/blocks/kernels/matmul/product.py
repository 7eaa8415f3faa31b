"""The public function: a product by the variant that was measured to be fastest.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul import dispatch, table
from flatout.blocks.kernels.matmul.autograd import needs_gradient, with_gradients
from flatout.blocks.kernels.matmul.packing import Matrix, Packed, matrix_of
from flatout.blocks.kernels.matmul.problem import Activation, Precision, Strides, lies_in_pieces, matmul_problem
from flatout.blocks.kernels.matmul.reference import multiplied
from flatout.blocks.kernels.matmul.table import MatmulSelection
from flatout.blocks.kernels.matmul.variant import MatmulInputs, Runner
from flatout.blocks.kernels.opaque import Side
from flatout.core.errors import UsageError


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
    """Multiply matrices: scale * (activation(a @ b + bias) + residual), by what this machine's table says is fastest.

    What was not measured runs by the vendor's library, and nothing is measured unasked: use `flatout matmul`, or
    `with flatout.blocks.kernels.matmul.measuring():`. `matmul_selection` tells what runs and why. The product is
    differentiable; the gradients' products are selected alike, and an activation is then a step of its own, since its input
    is saved. Under autocast operands are cast as torch casts them; within torch.compile this is torch's own product.

    Args:
        a: The left matrix, (..., M, K).
        b: The right matrix, (K, N). As `Packed` it is a matrix that stays the same over many calls: copies of it are cached.
        bias: A row that is added, (N,).
        activation: One of 'relu', 'silu', 'gelu' and 'gelu_tanh'.
        residual: A matrix that is added after the activation, (..., M, N).
        scale: Float32, of one number or one a row.
        precision: 'float32', for float32 operands on a GPU, allows three or six products of a coarser type that together err
            no more than float32's.
        out_dtype: The type of the result; of 8 bits it saturates. That of the operands when left out.
        strides: 'any' allows a result with gaps between rows.

    Returns:
        The result, (..., M, N).

    Raises:
        UsageError: Sizes, types or devices do not fit one another, or a result of 8 bits needs a gradient.

    >>> matmul(torch.eye(2), torch.tensor([[1.0, -2.0], [3.0, 4.0]]), activation="relu")
    tensor([[1., 0.],
            [3., 4.]])
    """
    if torch.compiler.is_compiling():
        x = MatmulInputs(a, b, bias, residual, scale)
        return _composed(x, activation=activation, out_dtype=out_dtype or a.dtype)
    source = b.source if isinstance(b, Packed) else b
    is_autocast = torch.is_autocast_enabled("cuda" if a.is_cuda else "cpu")
    if not (is_autocast or needs_gradient(a, source, bias, residual, scale)):
        key = dispatch.call_key(a, b, bias, residual, scale, (activation, precision, out_dtype, strides))
        runner = dispatch.known(key)
        if runner is not None:  # nothing was looked at but the key
            return runner(a, b, bias, residual, scale)
    else:
        key = None
    options = {"activation": activation, "precision": precision, "out_dtype": out_dtype, "strides": strides}
    return _first(MatmulInputs(a, b, bias, residual, scale), key, options)


def matmul_selection(a: Tensor, b: Tensor | Packed, *, is_captured: bool = False, **options: object) -> MatmulSelection:
    """The variant that `matmul` of these takes, and why; `is_captured`: in a captured graph. Keywords are `matmul`'s."""
    right = matrix_of(b)
    flat = a.reshape(-1, a.shape[-1])
    problem = matmul_problem(flat, right, is_constant=b is not right, **options)  # type: ignore[arg-type]
    return table.select_variant(problem, is_captured=is_captured)


def _first(x: MatmulInputs, key: object, options: dict[str, Any]) -> Tensor:
    """A call whose runner is not known yet, or which is differentiated."""
    if x.a.dim() < 2:
        raise UsageError(f"a is {tuple(x.a.shape)}; give (..., M, K), as `a.unsqueeze(0)`")
    if torch.is_autocast_enabled(x.a.device.type):
        x = _autocast(x)
    right = matrix_of(x.b)
    flat = x._replace(
        a=_flat(x.a),
        b=x.b if lies_in_pieces(right) else right.contiguous(),
        bias=_row(x.bias),
        residual=None if x.residual is None else _flat(x.residual),
        scale=_row(x.scale),
    )
    right = matrix_of(flat.b)
    problem = matmul_problem(flat.a, right, *flat[2:], is_constant=flat.b is not right, **options)
    shape = (*x.a.shape[:-1], right.shape[1])
    if needs_gradient(flat.a, right, *flat[2:]):
        multiply = partial(matmul, precision=options["precision"])
        out = with_gradients(problem, flat, runner_of=dispatch.runner_of, multiply=multiply)
        return out if x.a.dim() == 2 else out.view(shape)
    runner = dispatch.runner_with_copies(problem)
    if any(one is not other for one, other in zip(flat, x, strict=True)):
        runner = _flattening(runner, shape, copies_b=flat.b is not x.b)
    if key is not None:
        dispatch.know(key, runner)
    return runner(*x)


def _flattening(runner: Runner, shape: tuple[int, ...], *, copies_b: bool) -> Runner:
    """A runner for operands of more than two dimensions, which copies first where neither rows nor columns are whole."""

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        right = matrix_of(b).contiguous() if copies_b else b
        rows = None if residual is None else _flat(residual)
        return runner(_flat(a), right, _row(bias), rows, _row(scale)).view(shape)

    return run


def _flat(x: Tensor) -> Tensor:
    """The matrix (rows, columns) of x, copied where neither is contiguous; x itself where nothing is to be done."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if lies_in_pieces(flat) else flat.contiguous()


def _row(x: Tensor | None) -> Tensor | None:
    """A contiguous copy of x where x is not."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def _composed(x: MatmulInputs, *, activation: Activation | None, out_dtype: torch.dtype) -> Tensor:
    """The product in torch's operators, for torch.compile to fuse."""
    flat, rows = (t if t is None else t.reshape(-1, t.shape[-1]) for t in (x.a, x.residual))
    right = matrix_of(x.b)
    out = multiplied(flat, right, x.bias, rows, x.scale, activation=activation, out_dtype=out_dtype)  # type: ignore[arg-type]
    return out.view(*x.a.shape[:-1], right.shape[-1])


def _autocast(x: MatmulInputs) -> MatmulInputs:
    """Cast float32 operands to autocast's type; a weight that is cast at each call is not constant."""
    dtype, matrix = torch.get_autocast_dtype(x.a.device.type), matrix_of(x.b)
    a, right, bias, residual = (
        t.to(dtype) if t is not None and t.dtype == torch.float32 else t for t in (x.a, matrix, x.bias, x.residual)
    )
    return MatmulInputs(a, x.b if right is matrix else right, bias, residual, x.scale)  # type: ignore[arg-type]
