"""Gradients of a product, whichever way it is done.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.matmul.packing import Packed, matrix_of
from flatout.kernels.matmul.problem import Epilogue, Problem, problem_of
from flatout.kernels.matmul.reference import finished
from flatout.kernels.matmul.way import Runner

Multiply = Callable[[Tensor, "Tensor | Packed"], Tensor]


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a result of these is to be differentiated."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # not any(...): this is in the way of every call
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def run_kernel(
    bind: Callable[[Problem], Runner],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    **asked: Any,
) -> Tensor:
    """What a kernel's `run` does: binds, runs, and is differentiable; gradients are the library's products."""
    sides = (bias, residual, scale)
    problem = problem_of(a, b, *sides, **asked)
    if not needs_gradient(a, b, *sides):
        return bind(problem)(a, b, *sides)
    return with_gradients(problem, a, b, b, *sides, runner_of=bind, multiply=lambda x, y: x @ matrix_of(y))


def with_gradients(
    problem: Problem,
    a: Tensor,
    b: Tensor | Packed,
    matrix: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *,
    runner_of: Callable[[Problem], Runner],
    multiply: Multiply,
) -> Tensor:
    """The product with its bias in one call; what follows it in torch's operators, since an activation's input is kept for its
    gradient anyway. `matrix` is b's, through which its gradient goes. Without activation, scale and another type the residual
    is in the call, too.

    Raises UsageError where the result is to have 8 bits, which have no gradient.
    """
    if problem.out_dtype.itemsize == 1:
        raise UsageError(
            f"a result of {problem.out_dtype} has no gradient; detach the operands, or leave out_dtype out"
        )
    activation, epilogue = problem.epilogue.activation, problem.epilogue
    is_whole = activation is None and scale is None and problem.out_dtype == problem.dtype
    inner = problem._replace(
        out_dtype=problem.dtype, epilogue=Epilogue(epilogue.has_bias, None, epilogue.has_residual and is_whole)
    )
    added = residual if is_whole else None
    out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        a, matrix, bias, added, b, runner_of(inner), multiply
    )
    if is_whole:
        return out
    return finished(out, activation=activation, residual=residual, scale=scale, out_dtype=problem.out_dtype)


class _Product(torch.autograd.Function):
    """a @ b + bias + residual. Its gradients are products of their own: g @ b.T, and a.T @ g."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        kept: Tensor | Packed,
        runner: Runner,
        multiply: Multiply,
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.multiply = multiply
        return runner(a, kept if isinstance(kept, Packed) else b, bias, residual, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        return (
            ctx.multiply(grad, b.T) if needs_a else None,
            ctx.multiply(a.T, grad) if needs_b else None,
            grad.sum(dim=0) if needs_bias else None,
            grad if needs_residual else None,
            None,
            None,
            None,
        )
