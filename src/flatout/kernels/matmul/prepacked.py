"""oneDNN on a CPU, on a weight that is laid out once as its kernels want it, with the activation in the same call.

The plain product lays the weight out at each call, or takes kernels that need not: for a few rows that is a good part of the
time.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.matmul.differentiable import run_kernel
from flatout.kernels.matmul.packing import Packed, made_of
from flatout.kernels.matmul.problem import Problem, problem_of
from flatout.kernels.matmul.reference import finished
from flatout.kernels.matmul.way import Runner, Way
from flatout.records.kernel import Kernel

PREPACKED: Final = Way(name="prepacked")
_ACTIVATIONS: Final = {None: ("none", ""), "relu": ("relu", ""), "silu": ("swish", "")} | {
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}
"""As oneDNN's post-operations are called in torch."""
_DTYPES: Final = (torch.float32, torch.bfloat16)


def refusal(problem: Problem) -> str | None:
    """Why oneDNN cannot take this, or has nothing to lay out once."""
    if problem.device.type != "cpu":
        return "oneDNN multiplies on CPUs"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this torch has no oneDNN"
    if not problem.is_kept:
        return "b does not stay the same (flatout.kernels.matmul.Packed, flatout.kernels.Linear)"
    if problem.dtype not in _DTYPES:
        return f"oneDNN's products here are not of {problem.dtype}"
    if problem.dtype != torch.float32 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return f"this processor has no units for {problem.dtype}"
    return "there is nothing to multiply" if min(problem.m, problem.n, problem.k) == 0 else None


def bind(problem: Problem) -> Runner:
    """Lays b out at the first call."""
    attribute, algorithm = _ACTIVATIONS[problem.epilogue.activation]
    linear = torch.ops.mkldnn._linear_pointwise

    def pack(b: Tensor) -> Tensor:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(b.T.contiguous(), problem.m)
        return packed

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        weight = made_of(b, ("oneDNN", problem.m), pack)
        product = linear(a, weight, bias, attribute, [], algorithm)
        return finished(product, residual=residual, scale=scale, out_dtype=problem.out_dtype)

    return run


def _refusal(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> str | None:
    return refusal(problem_of(a, b, *sides, is_kept=True, **asked))


def _run(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> Tensor:
    return run_kernel(bind, a, b, *sides, **asked)


KERNEL: Final = Kernel(
    id="matmul.prepacked",
    op="matmul",
    title="oneDNN on a weight that is laid out once",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=50,
)
