"""The vendor's library with bias and activation in the product's own call: on a GPU cuBLASLt's epilogue."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul import vendor
from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.packing import Matrix, matrix_of
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.reference import finished
from flatout.blocks.kernels.matmul.variant import Runner, Variant
from flatout.blocks.kernels.opaque import Side

_ACTIVATIONS: Final = {"relu": False, "gelu_tanh": True}
"""To `use_gelu` of `torch._addmm_activation`."""


def refusal(problem: MatmulProblem) -> str | None:
    """Why bias and activation are not to be had from the vendor's library."""
    if problem.device.type != "cuda":
        return "the library for CPUs is called without an activation"
    if not problem.epilogue.has_bias or problem.epilogue.activation not in _ACTIVATIONS:
        return "the library fuses a bias with relu or gelu_tanh, nothing else"
    return "precision 'float32' has implementations of its own" if problem.precision is not None else None


def bind(problem: MatmulProblem, variant: Variant | None = None) -> Runner:
    """Where a gradient is needed, the activation is a step of its own, and the product before it is the plain library's."""
    if problem.epilogue.activation is None:
        return vendor.bind(problem)
    uses_gelu = _ACTIVATIONS[problem.epilogue.activation]

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        product = torch._addmm_activation(bias, a, matrix_of(b), use_gelu=uses_gelu)  # type: ignore[arg-type]
        return finished(product, residual=residual, scale=scale, out_dtype=problem.out_dtype)

    return run


KERNEL: Final = matmul_kernel(
    "vendor-fused", "the vendor's library with bias and activation in its call", bind, order=15, refusal=refusal
)
