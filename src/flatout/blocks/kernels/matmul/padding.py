"""The vendor's library on copies of the operands whose rows begin at multiples of 16 bytes.

cuBLAS reads matrices whose rows begin elsewhere by narrow loads, at a fraction of the speed. Weights are copied once,
activations at each call, which the measurement counts. The result is written into aligned rows, too, and becomes contiguous
by what follows the sum, or by a copy; with strides='any' it is returned as it is.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.packing import (
    Matrix,
    derived_from,
    has_aligned_rows,
    repacked,
    rounded_up,
    row_unit,
)
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.reference import finished
from flatout.blocks.kernels.matmul.variant import Runner, Variant
from flatout.blocks.kernels.matmul.vendor import exactly_float32
from flatout.blocks.kernels.opaque import Side


def variants(problem: MatmulProblem) -> tuple[Variant, ...]:
    """Strides alone; sizes rounded up to 16 bytes; to 64 numbers. Those that would be the same are left out."""
    unit = row_unit(problem.dtype)
    rounded = tuple(u for u in (unit, 64) if any(size % u for size in (problem.n, problem.k)))
    return tuple(Variant(name="padded", unit=u) for u in (None, *rounded))


def refusal(problem: MatmulProblem) -> str | None:
    """Why there is nothing to align."""
    if problem.device.type != "cuda":
        return "rows that begin anywhere cost GPUs much, CPUs little"
    unit = row_unit(problem.dtype)
    if problem.dtype.itemsize > 4:
        return f"{problem.dtype} has rows of 16 bytes anyway"
    if all(size % unit == 0 for size in (problem.a_stride, problem.b_stride, problem.n, problem.k)):
        return f"all rows begin at multiples of {unit} numbers"
    return None


def bind(problem: MatmulProblem, variant: Variant) -> Runner:
    """Copies what is not aligned, multiplies, finishes."""
    unit = row_unit(problem.dtype)
    n, k = (rounded_up(size, variant.unit or 1) for size in (problem.n, problem.k))
    align_a = partial(with_aligned_rows, by_rows=problem.a_rows, rows=problem.m, columns=k, unit=unit)
    align_b = partial(with_aligned_rows, by_rows=problem.b_rows, rows=k, columns=n, unit=unit)
    epilogue, name = problem.epilogue, ("rows", k, n)
    pads_bias = epilogue.has_bias and n != problem.n
    is_done = epilogue == (epilogue.has_bias, None, False, None) and problem.out_dtype == problem.dtype
    stride = rounded_up(n, unit)

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        whole = a.new_empty((problem.m, stride))[:, :n]
        right = derived_from(b, name, align_b)
        assert isinstance(right, Tensor)
        with exactly_float32(problem):
            if bias is None:
                torch.mm(align_a(a), right, out=whole)
            else:
                added = torch.nn.functional.pad(bias, (0, n - problem.n)) if pads_bias else bias
                torch.addmm(added, align_a(a), right, out=whole)
        out = whole[:, : problem.n]
        if not is_done:
            out = finished(
                out, activation=epilogue.activation, residual=residual, scale=scale, out_dtype=problem.out_dtype
            )
        return out if problem.strides == "any" else out.contiguous()

    return run


def with_aligned_rows(x: Tensor, *, by_rows: bool, rows: int, columns: int, unit: int) -> Tensor:
    """A matrix of (rows, columns), zeros beyond x, whose stored rows begin at multiples of `unit`; x itself where they do."""
    stored = x if by_rows else x.T
    shape = (rows, columns) if by_rows else (columns, rows)
    if tuple(stored.shape) != shape or not has_aligned_rows(stored):
        stored = repacked(stored, rows=shape[0], columns=shape[1], stride=rounded_up(shape[1], unit))
    return stored if by_rows else stored.T


KERNEL: Final = matmul_kernel(
    "padded", "the vendor's library on aligned copies", bind, order=20, refusal=refusal, variants=variants
)
