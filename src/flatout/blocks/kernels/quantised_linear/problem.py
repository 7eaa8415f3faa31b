"""One product of a few rows with a packed weight, and the variants in which a device can run it.

M rows, N outputs, K inputs
"""

from __future__ import annotations

from math import log2
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Unit = Literal["tiles", "lanes"]
MOST_ROWS: Final = 16
"""What one tile of the matrix units holds; more rows are for a product that is not bound by reading the weight."""


class QuantisedProblem(NamedTuple):
    """Sizes and types of a product; what is selected for one problem is good for every weight of these sizes."""

    m: int
    n: int
    k: int
    bits: int
    group: int
    dtype: torch.dtype


class QuantisedVariant(NamedTuple):
    """A kernel and its sizes.

    `outputs` of a program; `depth` is BK of `lanes` (numbers, or groups with 4 bits) and not used by `tiles`; `parts` of the
    depth, which are added up by the last of them; `is_early`: may be launched while what comes before still runs.
    """

    unit: Unit
    outputs: int
    depth: int
    parts: int
    warps: int
    stages: int
    is_early: bool = False

    def __str__(self) -> str:
        early = ", early" if self.is_early else ""
        return f"{self.unit} {self.outputs}x{self.depth}/{self.parts}, {self.warps} warps, {self.stages} stages{early}"


def quantised_problem(x: Tensor, codes: Tensor, *, bits: int, group: int) -> QuantisedProblem:
    """The problem of `x` (..., I) and the codes of a weight."""
    return QuantisedProblem(
        x.numel() // x.shape[-1] if x.shape[-1] else 0, codes.shape[0], x.shape[-1], bits, group, x.dtype
    )


def proposed_variants(problem: QuantisedProblem) -> list[QuantisedVariant]:
    """What is worth a measurement, the likeliest first: it is taken where nothing was measured.

    A weight is read at full speed while some 30 KiB are on their way to each of a device's 132 processors (H200: 4.8 TB/s times
    0.8 us); many small programs reach that with few registers, few large ones with stages.
    """
    lanes, tiles = [], []
    if problem.m == 1:
        for outputs, depth, warps in _LANES[problem.bits]:
            most = -(-problem.k // (depth * problem.group if problem.bits == 4 else depth))
            lanes += [
                QuantisedVariant("lanes", outputs, depth, parts, warps, 2) for parts in (1, 2, 4) if parts <= most
            ]
    for outputs, warps in ((32, 2), (64, 4), (16, 1)):
        for parts in _parts(problem, outputs):
            tiles += [QuantisedVariant("tiles", outputs, 0, parts, warps, stages) for stages in (4, 6)]

    def from_wanted(variant: QuantisedVariant) -> float:
        warps = -(-problem.n // variant.outputs) * variant.parts * variant.warps
        return abs(log2(warps / _WANTED)) + 0.5 * log2(variant.parts)

    return sorted(lanes, key=from_wanted)[:_MOST] + sorted(tiles, key=from_wanted)[:_MOST]


_WANTED: Final = 2112
"""Warps: sixteen for each processor of an H200."""
_MOST: Final = 8
"""Variants of each unit: each takes a second to compile."""
_LANES: Final = {
    4: ((8, 8, 2), (8, 4, 1), (4, 8, 2), (8, 16, 4), (4, 16, 4), (4, 8, 1)),
    8: ((4, 1024, 4), (8, 512, 4), (4, 2048, 8), (2, 2048, 4)),
    16: ((4, 512, 4), (8, 512, 8), (4, 1024, 4), (2, 2048, 8), (1, 2048, 4)),
}
"""(outputs, depth, warps): 16 to 64 bytes of a thread at a time."""


def _parts(problem: QuantisedProblem, outputs: int) -> list[int]:
    """Those that make 400 to 4000 programs, where there are as many steps."""
    steps = problem.k // problem.group
    usable = [p for p in (1, 2, 4, 8, 16) if p <= steps and 400 <= -(-problem.n // outputs) * p <= 4000]
    return usable or [min(16, steps)]
