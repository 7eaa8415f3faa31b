"""How matrices are rounded to float8: their formats, one scale for a matrix, and the scale of the gradient of logits.

N tokens
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

FORWARD: Final = torch.float8_e4m3fn
"""What hidden states and weights are rounded to: 3 bits behind the point."""
GRADIENT: Final = torch.float8_e5m2
"""What gradients of results are rounded to: 2 bits, and the exponents that probabilities over a vocabulary need."""
LARGEST: Final = torch.finfo(FORWARD).max
LARGEST_GRADIENT: Final = torch.finfo(GRADIENT).max
GRADIENT_UNIT: Final = 2.0**14
"""What the largest scale of a token's gradient becomes. A gradient of logits is at most that scale (3.5 times it with a z-loss
before e5m2 ends, at 57344), and probabilities down to 2^-30 of it are not lost."""


class Rounded(NamedTuple):
    """A matrix in float8, and what its numbers are multiplied with to be the matrix again: one number, on its device."""

    values: Tensor
    scale: Tensor


def step_of(matrix: Tensor, format: torch.dtype = FORWARD) -> Tensor:
    """The largest magnitude over the largest number of the format, float32: what one float8 step of 1 stands for."""
    if matrix.numel() == 0:
        return torch.ones((), device=matrix.device)
    largest: Tensor = torch.linalg.vector_norm(matrix, float("inf"), dtype=torch.float32)
    return (largest / torch.finfo(format).max).clamp(min=torch.finfo(torch.float32).tiny)


def float8_of(matrix: Tensor, format: torch.dtype = FORWARD) -> Rounded:
    """The matrix in a format with one scale; a number that is not finite makes all that are computed with it NaN.

    No number over its scale is so much above the largest of the format that it would be rounded to another.
    """
    scale = step_of(matrix, format)
    return Rounded((matrix.float() * scale.reciprocal()).to(format), scale)


def gradient_step(scales_N: Tensor) -> Tensor:
    """What 1 stands for in the float8 gradient of logits: a power of two, from the largest scale of a token."""
    largest = torch.linalg.vector_norm(scales_N, float("inf")) if len(scales_N) else scales_N.new_zeros(())
    exponent = largest.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil()
    return exponent.exp2().float() / GRADIENT_UNIT
