"""Exact GELU of numbers in 16 bits, in code that is compiled for a GPU, with a short formula for the error function.

CUDA's own is some thirty instructions a number. That is longer than reading and writing the numbers takes: of GPT-2's steps the
compiled kernels of GELU and its gradient take 1.6 times what their bytes need (bench/results/2026-11-29-h200, account_gpt2_peer).

GELU and its gradient stay one operator each until kernels are made of them. Written out in the graph, what the gradient needs of
the input alone was computed in the forward pass and saved in float32: four bytes a number more to write, and to read again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.blocks.kernels.opaque import opaque
from flatout.core.runtime.patches import set_attributes

_HALF: Final = (torch.bfloat16, torch.float16)
_STEP: Final = 0.3275911 * 2**-0.5
_TERMS: Final = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
"""The error function to 1.5e-7 (Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26), at x / sqrt(2)."""
_PEAK: Final = 0.3989422804014327
"""Of the normal density, 1 / sqrt(2 pi)."""


def short_gelu_in_graphs(device: str = "cuda") -> Callable[[], None]:
    """Have GELU in 16 bits computed by the short formula in code that is compiled for this kind of device; returns the undo."""
    original = F.gelu
    _register_lowerings()

    def gelu(input: Tensor, *, approximate: str = "none") -> Tensor:
        is_exact = approximate == "none" and input.dtype in _HALF and input.device.type == device
        if is_exact and torch.compiler.is_compiling():
            found: Tensor = ShortGelu.apply(input)  # type: ignore[no-untyped-call]
            return found
        return original(input, approximate=approximate)

    return set_attributes(F, gelu=gelu)


class ShortGelu(torch.autograd.Function):
    """GELU of any shape, and its gradient, each by one exponential."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        """GELU as F.gelu has it; sums are float32."""
        ctx.save_for_backward(input)
        found: Tensor = _short_gelu(input)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient times GELU's slope."""
        (input,) = ctx.saved_tensors
        found: Tensor = _short_gelu_backward(gradient, input)
        return found


@opaque("short_gelu(Tensor input) -> Tensor", torch.empty_like)
def _short_gelu(input: Tensor) -> Tensor:
    found: Tensor = _gelu(torch, float, input.float())
    return found.to(input.dtype)


@opaque("short_gelu_backward(Tensor gradient, Tensor input) -> Tensor", lambda gradient, input: torch.empty_like(input))
def _short_gelu_backward(gradient: Tensor, input: Tensor) -> Tensor:
    slope: Tensor = _slope(torch, float, input.float())
    return (gradient.float() * slope).to(input.dtype)


@cache
def _register_lowerings() -> None:
    """What Inductor makes of both: parts of its kernels. It does not promise to keep the interface."""
    from torch._inductor.lowering import make_pointwise, register_lowering
    from torch._inductor.virtualized import ops

    def number(value: float) -> Any:
        return ops.constant(value, torch.float32)

    def wide(value: Any) -> Any:
        return ops.to_dtype(value, torch.float32)

    def forward(input: Any) -> Any:
        dtype = input.get_dtype()
        return make_pointwise(lambda x: ops.to_dtype(_gelu(ops, number, wide(x)), dtype))(input)

    def backward(gradient: Any, input: Any) -> Any:
        dtype = input.get_dtype()
        whole = make_pointwise(lambda g, x: ops.to_dtype(wide(g) * _slope(ops, number, wide(x)), dtype))
        return whole(gradient, input)

    register_lowering(torch.ops.flatout.short_gelu)(forward)
    register_lowering(torch.ops.flatout.short_gelu_backward)(backward)


def _gelu(m: Any, number: Callable[[float], Any], x: Any) -> Any:
    """GELU of float32; `m` has the functions of tensors, or of the values in Inductor's kernels, and `number` its constants."""
    return x * _cumulative(m, number, x, _density(m, number, x))


def _slope(m: Any, number: Callable[[float], Any], x: Any) -> Any:
    density = _density(m, number, x)
    return _cumulative(m, number, x, density) + number(_PEAK) * x * density


def _density(m: Any, number: Callable[[float], Any], x: Any) -> Any:
    """exp(-x^2 / 2)."""
    return m.exp(number(-0.5) * x * x)


def _cumulative(m: Any, number: Callable[[float], Any], x: Any, density: Any) -> Any:
    """The normal distribution up to x."""
    t = m.reciprocal(number(1.0) + number(_STEP) * m.abs(x))
    sums = t * number(_TERMS[0])
    for term in _TERMS[1:]:
        sums = t * (number(term) + sums)
    tail = number(0.5) * sums * density
    return m.where(x < number(0.0), tail, number(1.0) - tail)
