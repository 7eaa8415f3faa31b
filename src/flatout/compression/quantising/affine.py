"""The affine transformation between numbers and few bits: q = round(x / scale) + zero, held within the format's range.

Ranges come from a tensor as a whole, from each channel, or from each group of neighbours in a channel.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.errors import UsageError

_LEAST: Final = 2.0**-100
"""No scale is smaller: what is all zeros must not be divided by 0, and x / scale must stay finite."""


class Affine(NamedTuple):
    """`scale` and `zero` are broadcast against what is transformed; `low` and `high` are the ends of the whole numbers."""

    scale: Tensor
    zero: Tensor
    low: int
    high: int

    def whole(self, x: Tensor) -> Tensor:
        """The whole numbers of `x` as int32: to the nearest, ties to even, held within the range."""
        return (torch.round(x / self.scale) + self.zero).clamp(self.low, self.high).to(torch.int32)

    def floats(self, whole: Tensor) -> Tensor:
        """The numbers that `whole` stands for."""
        return (whole.to(self.scale.dtype) - self.zero) * self.scale

    def rounded(self, x: Tensor) -> Tensor:
        """`x` through the bits and back: within the range no number moves by more than half a scale."""
        return self.floats(self.whole(x))


def limits(bits: int, *, symmetric: bool) -> tuple[int, int]:
    """The smallest and largest whole number; symmetric leaves the smallest out, so that -x is there whenever x is.

    >>> limits(8, symmetric=True), limits(4, symmetric=False)
    ((-127, 127), (-8, 7))
    """
    if not 2 <= bits <= 16:
        raise UsageError(f"{bits} bits; whole numbers of 2 to 16 bits are made")
    high = 2 ** (bits - 1) - 1
    return (-high if symmetric else -high - 1), high


def for_range(low: Tensor, high: Tensor, *, bits: int = 8, symmetric: bool = True) -> Affine:
    """The transformation for numbers in low..high (tensors of one shape). Zero is always exact: a range without it is widened.

    Raises UsageError for a range that is not finite or upside down.
    """
    if not bool((torch.isfinite(low) & torch.isfinite(high) & (low <= high)).all()):
        raise UsageError("a range is not finite, or its end lies below its start; look for NaN in what was observed")
    least, most = limits(bits, symmetric=symmetric)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    if symmetric:
        scale = (torch.maximum(-low, high) / most).clamp(min=_LEAST)
        return Affine(scale, torch.zeros_like(scale), least, most)
    # A half each, since the difference of two finite numbers may not be.
    scale = ((high / 2 - low / 2) / ((most - least) / 2)).clamp(min=_LEAST)
    return Affine(scale, (least - torch.round(low / scale)).clamp(least, most), least, most)


def per_tensor(x: Tensor, *, bits: int = 8, symmetric: bool = True) -> Affine:
    """From the smallest and largest number."""
    return for_range(x.amin(), x.amax(), bits=bits, symmetric=symmetric)


def per_channel(x: Tensor, *, bits: int = 8, symmetric: bool = True, dim: int = 0) -> Affine:
    """From the smallest and largest number of each index of `dim`."""
    others = [d for d in range(x.dim()) if d != dim % x.dim()]
    if not others:
        return for_range(x, x, bits=bits, symmetric=symmetric)
    return for_range(x.amin(others, keepdim=True), x.amax(others, keepdim=True), bits=bits, symmetric=symmetric)


def grouped(x: Tensor, *, group: int) -> Tensor:
    """[n, k] as [n, groups, group], filled up with 0.

    >>> grouped(torch.ones(1, 3), group=2).tolist()
    [[[1.0, 1.0], [1.0, 0.0]]]
    """
    if x.dim() != 2 or group < 1:
        raise UsageError(
            f"groups of {group} in a tensor of {x.dim()} dimensions; a matrix and groups of at least 1 are needed"
        )
    n, k = x.shape
    return torch.nn.functional.pad(x, (0, -k % group)).view(n, -1, group)


def per_group(x: Tensor, *, group: int, bits: int = 4, symmetric: bool = True) -> Affine:
    """From each `group` neighbours in a row of a matrix; transforms what `grouped` gives."""
    parts = grouped(x, group=group)
    return for_range(parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True), bits=bits, symmetric=symmetric)
