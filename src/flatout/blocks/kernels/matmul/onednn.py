"""The product by oneDNN on a CPU, of a weight that is packed once as its kernels want it, with the activation in the same call.

The plain product packs the weight at each call, or takes kernels that need not: for a few rows that is a good part of the
time.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.packing import Matrix, derived_from
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.reference import finished
from flatout.blocks.kernels.matmul.variant import Runner, Variant
from flatout.blocks.kernels.opaque import Side

_ACTIVATIONS: Final = {None: ("none", ""), "relu": ("relu", ""), "silu": ("swish", "")} | {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
"""As oneDNN's post-operations are called in torch."""
_DTYPES: Final = (torch.float32, torch.bfloat16)


def refusal(problem: MatmulProblem) -> str | None:
    """Why oneDNN cannot take this, or has nothing to pack once."""
    if problem.device.type != "cpu":
        return "oneDNN multiplies on CPUs"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no oneDNN"
    if not problem.is_constant:
        return "b does not stay the same (flatout.blocks.kernels.matmul.Packed, flatout.blocks.kernels.Linear)"
    if problem.dtype not in _DTYPES:
        return f"oneDNN's products here are not of {problem.dtype}"
    if problem.dtype != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return f"this processor has no units for {problem.dtype}"
    return "there is nothing to multiply" if min(problem.m, problem.n, problem.k) == 0 else None


def bind(problem: MatmulProblem, variant: Variant | None = None) -> Runner:
    """Packs b at the first call."""
    attribute, algorithm = _ACTIVATIONS[problem.epilogue.activation]
    linear = torch.ops.mkldnn._linear_pointwise

    def pack(b: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(b.T.contiguous(), problem.m)
        return packed

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        weight = derived_from(b, ("oneDNN", problem.m), pack)
        product = linear(a, weight, bias, attribute, [], algorithm)
        return finished(product, residual=residual, scale=scale, out_dtype=problem.out_dtype)

    return run


KERNEL: Final = matmul_kernel("prepacked", "oneDNN on a weight that is packed once", bind, order=50, refusal=refusal)
