"""The vendor's library on operands laid out again, so that rows begin at multiples of 16 bytes.

cuBLAS reads matrices whose rows begin elsewhere by narrow loads, at a fraction of the speed. Weights are laid out once,
activations at each call, which the measurement of this way counts. The result is written into aligned rows, too, and made
contiguous by what follows the sum, or by a copy; with strides='any' it is handed over as it lies.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from flatout.kernels.matmul.differentiable import run_kernel
from flatout.kernels.matmul.packing import Packed, has_aligned_rows, made_of, repacked, rounded_up, row_unit
from flatout.kernels.matmul.problem import Problem, problem_of
from flatout.kernels.matmul.reference import finished
from flatout.kernels.matmul.vendor import exactly_float32
from flatout.kernels.matmul.way import Runner, Way
from flatout.records.kernel import Kernel


def ways(problem: Problem) -> tuple[Way, ...]:
    """Strides alone; sizes rounded up to 16 bytes; to 64 numbers. Those that would be the same are left out."""
    unit = row_unit(problem.dtype)
    rounded = tuple(u for u in (unit, 64) if any(size % u for size in (problem.n, problem.k)))
    return tuple(Way(name="padded", unit=u) for u in (None, *rounded))


def refusal(problem: Problem) -> str | None:
    """Why there is nothing to lay out again."""
    if problem.device.type != "cuda":
        return "rows that begin anywhere cost GPUs much, CPUs little"
    unit = row_unit(problem.dtype)
    if problem.dtype.itemsize > 4:
        return f"{problem.dtype} has rows of 16 bytes anyway"
    if all(size % unit == 0 for size in (problem.a_stride, problem.b_stride, problem.n, problem.k)):
        return f"all rows begin at multiples of {unit} numbers"
    return None


def bind(problem: Problem, way: Way) -> Runner:
    """Lays out what has to be, multiplies, finishes."""
    unit = row_unit(problem.dtype)
    n, k = (rounded_up(size, way.unit or 1) for size in (problem.n, problem.k))
    lay_a = partial(laid_out, by_rows=problem.a_rows, rows=problem.m, columns=k, unit=unit)
    lay_b = partial(laid_out, by_rows=problem.b_rows, rows=k, columns=n, unit=unit)
    epilogue, name = problem.epilogue, ("rows", k, n)
    pads_bias = epilogue.has_bias and n != problem.n
    is_done = epilogue == (epilogue.has_bias, None, False, None) and problem.out_dtype == problem.dtype
    stride = rounded_up(n, unit)

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        whole = a.new_empty((problem.m, stride))[:, :n]
        right = made_of(b, name, lay_b)
        assert isinstance(right, Tensor)
        with exactly_float32(problem):
            if bias is None:
                torch.mm(lay_a(a), right, out=whole)
            else:
                added = torch.nn.functional.pad(bias, (0, n - problem.n)) if pads_bias else bias
                torch.addmm(added, lay_a(a), right, out=whole)
        out = whole[:, : problem.n]
        if is_done:
            return out if problem.strides == "any" else out.contiguous()
        out = finished(out, activation=epilogue.activation, residual=residual, scale=scale, out_dtype=problem.out_dtype)
        return out if problem.strides == "any" else out.contiguous()

    return run


def laid_out(x: Tensor, *, by_rows: bool, rows: int, columns: int, unit: int) -> Tensor:
    """A matrix of (rows, columns), zeros where x has none, whose pieces begin at multiples of `unit`; x itself where it is so."""
    stored = x if by_rows else x.T
    shape = (rows, columns) if by_rows else (columns, rows)
    if tuple(stored.shape) != shape or not has_aligned_rows(stored):
        stored = repacked(stored, rows=shape[0], columns=shape[1], stride=rounded_up(shape[1], unit))
    return stored if by_rows else stored.T


def _refusal(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> str | None:
    return refusal(problem_of(a, b, *sides, **asked))


def _run(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> Tensor:
    return run_kernel(lambda problem: bind(problem, ways(problem)[0]), a, b, *sides, **asked)


KERNEL: Final = Kernel(
    id="matmul.padded",
    op="matmul",
    title="the vendor's library on aligned copies",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=30,
)
