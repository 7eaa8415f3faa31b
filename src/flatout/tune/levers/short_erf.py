"""Exact GELU of numbers in 16 bits, in code that is compiled for a GPU, with a short formula for the error function.

CUDA's own is some thirty instructions a number. That is longer than reading and writing the numbers takes: of GPT-2's steps the
compiled kernels of GELU and its gradient take 1.6 times what their bytes need (bench/results/2026-11-29-h200, account_gpt2_peer).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

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
        x = input.float()
        return (x * _cumulative(x, torch.exp(-0.5 * x * x))).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient times GELU's slope."""
        (input,) = ctx.saved_tensors
        x = input.float()
        density = torch.exp(-0.5 * x * x)
        found: Tensor = gradient.float() * (_cumulative(x, density) + _PEAK * x * density)
        return found.to(input.dtype)


def _cumulative(x: Tensor, density: Tensor) -> Tensor:
    """The normal distribution up to x; `density` is exp(-x^2 / 2)."""
    t = 1 / (1 + _STEP * x.abs())
    sums = torch.zeros_like(t)
    for term in _TERMS:
        sums = t * (term + sums)
    tail = 0.5 * sums * density
    return torch.where(x < 0, tail, 1 - tail)
