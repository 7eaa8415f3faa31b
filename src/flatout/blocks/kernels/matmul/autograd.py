"""Gradients of a product, whichever implementation runs it.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.packing import Matrix, Packed, matrix_of
from flatout.blocks.kernels.matmul.problem import Epilogue, MatmulProblem, matmul_problem
from flatout.blocks.kernels.matmul.reference import finished
from flatout.blocks.kernels.matmul.variant import MatmulInputs, Runner
from flatout.blocks.kernels.opaque import Side
from flatout.core.errors import UsageError

Multiply = Callable[[Tensor, Matrix], Tensor]


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether a result of these is to be differentiated."""
    if torch.is_grad_enabled():
        for tensor in tensors:  # not any(...), which costs every call more
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def run_kernel(bind: Callable[[MatmulProblem], Runner], *tensors: Any, **options: Any) -> Tensor:
    """Bind and run a product as a kernel does; it is differentiable, by the library's products."""
    x = MatmulInputs(*tensors)
    problem = matmul_problem(*x, **options)  # type: ignore[arg-type]
    if not needs_gradient(*tensors):
        return bind(problem)(*x)
    return with_gradients(problem, x, runner_of=bind, multiply=lambda x, y: x @ matrix_of(y))


def with_gradients(
    problem: MatmulProblem, x: MatmulInputs, *, runner_of: Callable[[MatmulProblem], Runner], multiply: Multiply
) -> Tensor:
    """The product with its bias in one call; what follows it in torch's operators, since autograd saves an activation's input.

    Without activation, scale and another type the residual is in the call, too.

    Raises UsageError where the result is to have 8 bits, which have no gradient.
    """
    if problem.out_dtype.itemsize == 1:
        raise UsageError(
            f"a result of {problem.out_dtype} has no gradient; detach the operands, or leave out_dtype out"
        )
    activation, epilogue = problem.epilogue.activation, problem.epilogue
    is_whole = activation is None and x.scale is None and problem.out_dtype == problem.dtype
    inner = problem._replace(
        out_dtype=problem.dtype, epilogue=Epilogue(epilogue.has_bias, None, epilogue.has_residual and is_whole)
    )
    tensors = (x.a, matrix_of(x.b), x.bias, x.residual if is_whole else None)
    out: Tensor = _Product.apply(*tensors, x.b, runner_of(inner), multiply)  # type: ignore[no-untyped-call]
    if is_whole:
        return out
    return finished(out, activation=activation, residual=x.residual, scale=x.scale, out_dtype=problem.out_dtype)


class _Product(torch.autograd.Function):
    """The product a @ b + bias + residual. Its gradients are products of their own: g @ b.T, and a.T @ g."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Side, residual: Side, packed: Matrix, runner: Runner, multiply: Multiply
    ) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.multiply = multiply
        return runner(a, packed if isinstance(packed, Packed) else b, bias, residual, None)

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
