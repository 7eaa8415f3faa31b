"""The affine transformation between numbers and few bits: q = round(x / scale) + zero, held within the format's range.

Ranges come from a tensor as a whole, or from each channel.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.core.errors import UsageError

_LEAST: Final = 2.0**-100
"""No scale is smaller: what is all zeros must not be divided by 0, and x / scale must stay finite."""


class Affine(NamedTuple):
    """`scale` and `zero` are broadcast against what is transformed; `low` and `high` are the ends of the whole numbers."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def quantise(self, x: Tensor) -> Tensor:
        """The whole numbers of `x` as int32: to the nearest, ties to even, held within the range."""
        return (torch.round(x / self.scale) + self.zero).clamp(self.low, self.high).to(torch.int32)

    def dequantise(self, quantise: Tensor) -> Tensor:
        """The numbers that `quantise` stands for."""
        return (quantise.to(self.scale.dtype) - self.zero) * self.scale

    def fake_quantise(self, x: Tensor) -> Tensor:
        """`x` through the bits and back: within the range no number moves by more than half a scale."""
        return self.dequantise(self.quantise(x))


def for_range(low: Tensor, high: Tensor, *, symmetric: bool = True) -> Affine:
    """The transformation into 8 bits for numbers in low..high (tensors of one shape).

    Zero is exact: a range without it is widened. Symmetric leaves -128 out, so that -x is there whenever x is.

    Raises UsageError for a range that is not finite or upside down.
    """
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise UsageError("a range is not finite, or its end lies below its start; look for NaN in what was observed")
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if symmetric:
        scale = (torch.maximum(-low, high) / 127).clamp(min=_LEAST)
        return Affine(scale, torch.zeros_like(scale), -127, 127)
    # A half each, since the difference of two finite numbers may not be.
    scale = ((high / 2 - low / 2) / (255 / 2)).clamp(min=_LEAST)
    return Affine(scale, (-128 - torch.round(low / scale)).clamp(-128, 127), -128, 127)


def per_channel(x: Tensor) -> Affine:
    """The transformation into 8 bits with a scale for each index of the first dimension."""
    others = list(range(1, x.dim()))
    return for_range(x.amin(others, keepdim=True), x.amax(others, keepdim=True))


def grouped(x: Tensor, *, group: int) -> Tensor:
    """A matrix [n, k] as groups of neighbours [n, groups, group], padded with 0.

    >>> grouped(torch.ones(1, 3), group=2).tolist()
    [[[1.0, 1.0], [1.0, 0.0]]]
    """
    n, k = x.shape
    return torch.nn.functional.pad(x, (0, -k % group)).view(n, -1, group)
