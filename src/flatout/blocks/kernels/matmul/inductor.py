"""Inductor's own templates: the product and what follows it, compiled for this problem's sizes by torch.compile.

It takes seconds to a minute for each problem, so that it is measured only where it is asked for.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.packing import Matrix, matrix_of
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.reference import multiplied
from flatout.blocks.kernels.matmul.variant import Runner, Variant
from flatout.blocks.kernels.opaque import Side

_OPTIONS: Final[dict[str, Any]] = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "ATEN,TRITON,CPP"}


def refusal(problem: MatmulProblem) -> str | None:
    """Why torch.compile has no product for this."""
    if problem.precision is not None:
        return "torch.compile knows nothing of precision 'float32'"
    return "there is nothing to multiply" if min(problem.m, problem.n, problem.k) == 0 else None


def bind(problem: MatmulProblem, variant: Variant | None = None) -> Runner:
    """Compiles at the first call."""
    activation, out_dtype = problem.epilogue.activation, problem.out_dtype

    def product(a: Tensor, b: Tensor, bias: Side, residual: Side, scale: Side) -> Tensor:
        return multiplied(a, b, bias=bias, activation=activation, residual=residual, scale=scale, out_dtype=out_dtype)

    fused = torch.compile(product, fullgraph=True, dynamic=False, options=_OPTIONS)

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        with torch.no_grad():
            out: Tensor = fused(a, matrix_of(b), bias, residual, scale)
        return out

    return run


KERNEL: Final = matmul_kernel(
    "compiled", "Inductor's templates", bind, order=60, refusal=refusal, is_slow_to_compile=True
)
