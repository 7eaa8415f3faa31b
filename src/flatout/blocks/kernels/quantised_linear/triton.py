"""Triton's kernels for a few rows: the weight is read once, in its own bits; and the variants in which a device can run
a product.

M rows, N outputs, K inputs
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from math import log2
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.matmul.launch import Counters, TritonLaunch, scratch_and_counters
from flatout.blocks.kernels.matmul.problem import name_of
from flatout.blocks.kernels.matmul.triton import early
from flatout.blocks.kernels.opaque import Side, opaque
from flatout.blocks.kernels.quantised_linear.packing import GROUP
from flatout.blocks.kernels.selection import no_triton
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.quantised_linear.on_device.skinny"
Unit = Literal["tiles", "lanes"]
MOST_ROWS: Final = 16
"""What one tile of the matrix units holds; more rows are for a product that is not bound by reading the weight."""
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
_SELECTED: dict[tuple[QuantisedProblem, torch.device], QuantisedVariant | None] = {}


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


def _parts(problem: QuantisedProblem, outputs: int) -> list[int]:
    """Those that make 400 to 4000 programs, where there are as many steps."""
    steps = problem.k // problem.group
    usable = [p for p in (1, 2, 4, 8, 16) if p <= steps and 400 <= -(-problem.n // outputs) * p <= 4000]
    return usable or [min(16, steps)]


def use_variant(problem: QuantisedProblem, device: torch.device, variant: QuantisedVariant | None) -> None:
    """Take this variant for this problem from now on, in this process; None: torch's own product of a weight of 16 bits."""
    _SELECTED[problem, device] = variant


def selected_variant(problem: QuantisedProblem, device: torch.device) -> QuantisedVariant | None:
    """What was measured to be fastest, or what is likely to be: with 16 bits torch's own."""
    if (problem, device) in _SELECTED:
        return _SELECTED[problem, device]
    return None if problem.bits == 16 else proposed_variants(problem)[0]


def run(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> Tensor:
    """The product by the selected variant."""
    return _multiplied(x, codes, scales, bias, bits, group)  # type: ignore[no-any-return]


def run_variant(
    variant: QuantisedVariant, x: Tensor, codes: Tensor, scales: Side, bias: Side, *, bits: int, group: int
) -> Tensor:
    """The product by a variant that is named."""
    problem = quantised_problem(x, codes, bits=bits, group=group)
    y = x.new_empty((*x.shape[:-1], problem.n))
    if y.numel():
        _bound(problem, variant, x.device, bias is not None)(x.contiguous(), codes, scales, bias, y)
    return y


@opaque(
    "quantised_linear_triton(Tensor x, Tensor codes, Tensor? scales, Tensor? bias, int bits, int group) -> Tensor",
    lambda x, codes, scales, bias, bits, group: x.new_empty((*x.shape[:-1], codes.shape[0])),
)
def _multiplied(x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int, group: int) -> Tensor:
    variant = selected_variant(quantised_problem(x, codes, bits=bits, group=group), x.device)
    if variant is None:
        return F.linear(x, codes, bias)
    return run_variant(variant, x, codes, scales, bias, bits=bits, group=group)


@lru_cache(maxsize=1024)
def _bound(
    problem: QuantisedProblem, variant: QuantisedVariant, device: torch.device, has_bias: bool
) -> Callable[..., None]:
    """A launch for each form of call: what is launched without a look at the arguments must be like the first."""
    source: Any = import_module(_SOURCE)
    programs, is_tiles = -(-problem.n // variant.outputs), variant.unit == "tiles"
    options = {"num_warps": variant.warps, "num_stages": variant.stages, **early(variant.is_early)}
    launch = TritonLaunch(getattr(source, variant.unit), (programs, variant.parts, 1), **options)
    if is_tiles:
        form = (source.by_masks if device.type == "cuda" else source.by_arithmetic, variant.outputs, MOST_ROWS)
    else:
        kind: Any = getattr(import_module("triton.language"), name_of(problem.dtype))
        form = (kind, variant.outputs, variant.depth)
    constants = (problem.n, problem.k, problem.bits, problem.group, *form, variant.parts, variant.is_early)
    counters = Counters(programs, device) if variant.parts > 1 else None
    num = programs * variant.parts * variant.outputs * (MOST_ROWS if is_tiles else 1)

    def run(x: Tensor, codes: Tensor, scales: Side, bias: Side, y: Tensor) -> None:
        shared = (None, None) if counters is None else scratch_and_counters(num, counters, device)
        if problem.bits == 4 and not is_tiles:
            x = x.reshape(-1).view(torch.int64) if x.storage_offset() % 4 == 0 else x.clone().view(torch.int64)
            codes = codes.view(torch.int32)
        launch(x, codes, scales, bias, y, *shared, problem.m, *constants)

    return run


def refusal(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> str | None:
    """GPUs, 16-bit rows, at most 16 of them, a depth of whole groups."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}; these kernels are for bfloat16 and float16"
    why = no_triton(x, codes)
    if why is not None:
        return why
    rows = x.numel() // max(x.shape[-1], 1)
    if rows > MOST_ROWS:
        return f"there are {rows} rows; these kernels are for {MOST_ROWS} at most"
    if torch.is_grad_enabled() and (x.requires_grad or codes.requires_grad):
        return "gradients are recorded, and these kernels have none"
    return why_not_cut(x.shape[-1], group, codes)


def why_not_cut(depth: int, group: int, codes: Tensor) -> str | None:
    """Why the weight cannot be read in whole groups; None when it can."""
    if depth == 0 or depth % group or group < 32 or group & (group - 1):
        return f"a depth of {depth} is not cut into groups of {group}, which must be a power of two from 32 on"
    if not codes.is_contiguous():
        return "the codes are not contiguous"
    return None


KERNEL = kernel(__name__, "Triton: the weight is read once, in its own bits", run, order=100, refusal=refusal)
