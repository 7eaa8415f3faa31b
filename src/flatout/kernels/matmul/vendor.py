"""The vendor's library as torch calls it, with what it can do after the sum in the same call."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.matmul.differentiable import run_kernel
from flatout.kernels.matmul.packing import Packed, matrix_of
from flatout.kernels.matmul.problem import Problem
from flatout.kernels.matmul.reference import finished
from flatout.kernels.matmul.way import Runner, Way
from flatout.measure.loads import float32_precision
from flatout.records.kernel import Kernel

VENDOR: Final = Way(name="vendor")
FUSED: Final = Way(name="vendor-fused")
_FUSED_ACTIVATIONS: Final = {"relu": False, "gelu_tanh": True}
"""To `use_gelu` of `torch._addmm_activation`, which on a GPU is cuBLASLt's epilogue."""


def bind(problem: Problem) -> Runner:
    """torch's product, with the bias in the same call, and the rest after it."""
    epilogue, out_dtype = problem.epilogue, problem.out_dtype
    activation = epilogue.activation
    if problem.precision is None and epilogue[1:] == (None, False, None) and out_dtype == problem.dtype:
        if epilogue.has_bias or problem.is_kept:
            return lambda a, b, bias, residual, scale: product_with_bias(a, matrix_of(b), bias)
        product = torch.mm  # the way of most calls has nothing beside it
        return lambda a, b, bias, residual, scale: product(a, b)  # type: ignore[arg-type]

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        with exactly_float32(problem):
            product = product_with_bias(a, matrix_of(b), bias)
        return finished(product, activation=activation, residual=residual, scale=scale, out_dtype=out_dtype)

    return run


def bind_fused(problem: Problem) -> Runner:
    """Bias and activation in the product's own call; only where `fused_refusal` is None."""
    uses_gelu = _FUSED_ACTIVATIONS[str(problem.epilogue.activation)]

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        product = torch._addmm_activation(bias, a, matrix_of(b), use_gelu=uses_gelu)  # type: ignore[arg-type]
        return finished(product, residual=residual, scale=scale, out_dtype=problem.out_dtype)

    return run


def fused_refusal(problem: Problem) -> str | None:
    """Why bias and activation are not to be had from the vendor's library."""
    if problem.device.type != "cuda":
        return "the library for CPUs is called without an activation"
    if not problem.epilogue.has_bias or problem.epilogue.activation not in _FUSED_ACTIVATIONS:
        return "the library fuses a bias with relu or gelu_tanh, nothing else"
    return "precision 'float32' has ways of its own" if problem.precision is not None else None


def product_with_bias(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """(M, K) @ (K, N) + bias, as one call."""
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def exactly_float32(problem: Problem) -> AbstractContextManager[None]:
    """Keeps a product of precision 'float32' from TF32, however torch is set."""
    is_asked = problem.precision is not None and problem.device.type == "cuda"
    if is_asked and torch.backends.cuda.matmul.fp32_precision != "ieee":
        return float32_precision(problem.device, "ieee")
    return nullcontext()


def _run(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> Tensor:
    return run_kernel(bind, a, b, *sides, **asked)


KERNEL: Final = Kernel(
    id="matmul.vendor",
    op="matmul",
    title="the vendor's library",
    module=__name__,
    run=_run,
    refusal=lambda *args, **kwargs: None,
    order=10,
)
