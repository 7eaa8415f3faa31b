"""The vendor's library as torch calls it, with a bias in the same call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.packing import Matrix, matrix_of
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.reference import finished
from flatout.blocks.kernels.matmul.variant import Runner, Variant
from flatout.blocks.kernels.opaque import Side
from flatout.machine.measure.loads import float32_precision

VENDOR: Final = Variant(name="vendor")


def bind(problem: MatmulProblem, variant: Variant | None = None) -> Runner:
    """The library's product with the bias in the same call, and the rest of the epilogue after it."""
    epilogue, out_dtype = problem.epilogue, problem.out_dtype
    activation = epilogue.activation
    if problem.precision is None and epilogue[1:] == (None, False, None) and out_dtype == problem.dtype:
        if epilogue.has_bias or problem.is_constant:
            return lambda a, b, bias, residual, scale: product_with_bias(a, matrix_of(b), bias)
        product = torch.mm  # what most calls need
        return lambda a, b, bias, residual, scale: product(a, b)  # type: ignore[arg-type]

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        with exactly_float32(problem):
            product = product_with_bias(a, matrix_of(b), bias)
        return finished(product, activation=activation, residual=residual, scale=scale, out_dtype=out_dtype)

    return run


def product_with_bias(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """The product (M, K) @ (K, N) + bias as one call."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def exactly_float32(problem: MatmulProblem) -> AbstractContextManager[None]:
    """Keeps a product of precision 'float32' from TF32, however torch is set."""
    is_asked = problem.precision is not None and problem.device.type == "cuda"
    if is_asked and torch.backends.cuda.matmul.fp32_precision != "ieee":
        return float32_precision(problem.device, "ieee")
    return nullcontext()


KERNEL: Final = matmul_kernel("vendor", "the vendor's library", bind, order=10)
