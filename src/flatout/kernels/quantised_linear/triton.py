"""Triton's kernels for a few rows: the weight is read once, in its own bits.

M rows, N outputs, K inputs
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.forced import no_triton
from flatout.kernels.matmul.launching import CAPTURING, Counters, Launch, enter, scratch, stream_now
from flatout.kernels.opaque import opaque
from flatout.kernels.quantised_linear.packing import GROUP
from flatout.kernels.quantised_linear.problem import MOST_ROWS, Problem, Way, problem_of, proposed
from flatout.records.kernel import Kernel

_SOURCE: Final = "flatout.kernels.quantised_linear.on_device.skinny"
_CHOSEN: dict[tuple[Problem, torch.device], Way | None] = {}


def keep(problem: Problem, device: torch.device, way: Way | None) -> None:
    """From now on this way is taken for this problem, in this process; None: torch's own product of a weight of 16 bits."""
    _CHOSEN[problem, device] = way


def way_of(problem: Problem, device: torch.device) -> Way | None:
    """What was measured to be fastest, or what is likely to be: with 16 bits torch's own."""
    if (problem, device) in _CHOSEN:
        return _CHOSEN[problem, device]
    return None if problem.bits == 16 else proposed(problem)[0]


def run(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> Tensor:
    """The reference's result."""
    made: Tensor = _multiplied(x, codes, scales, bias, bits, group)
    return made


def run_way(
    way: Way, x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, *, bits: int, group: int
) -> Tensor:
    """The same in a way that is named."""
    problem = problem_of(x, codes, bits=bits, group=group)
    y = x.new_empty((*x.shape[:-1], problem.n))
    if y.numel():
        _Bound.of(problem, way, x.device, bias is not None)(x.contiguous(), codes, scales, bias, y)
    return y


def _shapes(x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int, group: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@opaque(
    "quantised_linear_triton(Tensor x, Tensor codes, Tensor? scales, Tensor? bias, int bits, int group) -> Tensor",
    _shapes,
)
def _multiplied(x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int, group: int) -> Tensor:
    way = way_of(problem_of(x, codes, bits=bits, group=group), x.device)
    if way is None:
        return F.linear(x, codes, bias)
    return run_way(way, x, codes, scales, bias, bits=bits, group=group)


class _Bound:
    """A way of one problem on one device, ready to be launched."""

    def __init__(self, problem: Problem, way: Way, device: torch.device) -> None:
        self._problem, self._way, self._device = problem, way, device
        source: Any = import_module(_SOURCE)
        self._programs = -(-problem.n // way.outputs)
        options: dict[str, Any] = {"num_warps": way.warps, "num_stages": way.stages}
        if way.is_early:
            options["launch_pdl"] = True
        self._launch = Launch(getattr(source, way.unit), (self._programs, way.parts, 1), **options)
        unpack = source.by_masks if device.type == "cuda" else source.by_arithmetic
        self._constants: tuple[Any, ...] = (problem.n, problem.k, problem.bits, problem.group)
        if way.unit == "tiles":
            self._constants += (unpack, way.outputs, MOST_ROWS, way.parts, way.is_early)
        else:
            kind = _language_type(problem.dtype)
            self._constants += (kind, way.outputs, way.depth, way.parts, way.is_early)
        self._columns = MOST_ROWS if way.unit == "tiles" else 1
        self._counters = Counters(self._programs, device) if way.parts > 1 else None

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(problem: Problem, way: Way, device: torch.device, has_bias: bool) -> _Bound:
        """One for each form of call: what is launched without a look at the arguments must be like the first."""
        return _Bound(problem, way, device)

    def __call__(self, x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, y: Tensor) -> None:
        parts = counters = None
        if self._counters is not None:
            stream = CAPTURING
            if self._device.type == "cuda":
                enter(self._device)
                stream = stream_now()
            num = self._programs * self._way.parts * self._way.outputs * self._columns
            parts, counters = scratch(num, self._device, stream), self._counters.of(stream)
        if self._problem.bits == 4 and self._way.unit == "lanes":
            x = x.reshape(-1).view(torch.int64) if x.storage_offset() % 4 == 0 else x.clone().view(torch.int64)
            codes = codes.view(torch.int32)
        self._launch(x, codes, scales, bias, y, parts, counters, self._problem.m, *self._constants)


def _language_type(dtype: torch.dtype) -> Any:
    language: Any = import_module("triton.language")
    return {torch.bfloat16: language.bfloat16, torch.float16: language.float16}[dtype]


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
        return "the codes do not lie one after the other"
    return None


KERNEL: Final = Kernel(
    id="quantised_linear.triton",
    op="quantised_linear",
    title="Triton: the weight is read once, in its own bits",
    module=__name__,
    run=run,
    refusal=refusal,
    order=100,
)
