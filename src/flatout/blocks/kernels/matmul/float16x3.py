"""A float32 product from three products of float16 parts, which are twice as fast as six in bfloat16 and lack float32's range.

Lines of the operands are scaled by powers of two, which is exact, and the device itself looks whether the range suffices;
where it does not, the product in bfloat16 follows in the same call, without the host's knowing. Where float32 gives infinity
or NaN this gives NaN.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul import bfloat16x6
from flatout.blocks.kernels.matmul import triton as tiled
from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.launch import TritonLaunch
from flatout.blocks.kernels.matmul.packing import Matrix, derived_from, matrix_of, rounded_up
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.variant import Runner, Tile, Variant
from flatout.blocks.kernels.opaque import Side

_LEAST_DEPTH: Final = 1024
"""Float32's own error grows with the depth; with three float16 products it does not, and is the smaller from here on: sums of 264
positive numbers came out with 1.9e-7 against 0.7e-7, of 4096 with 2.1e-7 against 8.4e-7 (H200, rms over |a| @ |b|)."""
_TILES: Final = (
    Tile(m=128, n=128, k=64, stages=3, warps=8),
    Tile(m=128, n=128, k=32, stages=4, warps=8),
    Tile(m=64, n=128, k=64, stages=3, warps=4),
)
"""Two accumulators and two parts of each operand: a larger tile leaves the registers."""
_UNIT: Final = 8
"""Float16 numbers of 16 bytes."""


def refusal(problem: MatmulProblem) -> str | None:
    """Why three products would not be as good as float32, or cannot be run."""
    why = bfloat16x6.refusal(problem)
    if why is None and problem.k < _LEAST_DEPTH:
        return f"a depth of {problem.k} is below {_LEAST_DEPTH}, where float32 adds with less error"
    return why


def bind(problem: MatmulProblem, variant: Variant) -> Runner:
    """Compiles at the first call; a constant b is split once."""
    tile = variant.tile
    assert tile is not None
    source = import_module("flatout.blocks.kernels.matmul.on_device.float32")
    m, n, k = problem.sizes
    split_a = _splitter(lines=m, depth=k, stride=problem.a_stride, by_lines=problem.a_rows)
    split_b = _splitter(lines=n, depth=k, stride=problem.b_stride, by_lines=not problem.b_rows)
    tiles = ceil(m / tile.m) * ceil(n / tile.n)
    launch = tiled.launch_of(source.float16_products, tiles, tile)
    wide = bfloat16x6.variants(problem)[0].tile
    assert wide is not None
    in_bfloat16 = bfloat16x6.bfloat16_launch(problem, wide)
    a_block, b_block = tiled.stored_blocks(problem, tile)
    activation, by_rows, _ = tiled.epilogue_constants(problem)
    constants = (not problem.a_rows, not problem.b_rows, activation, by_rows, *tile.sizes, tile.group)

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        a_high, a_low, a_powers, a_counts = split_a(a)
        b_high, b_low, b_powers, b_counts = derived_from(b, "float16x3", split_b)
        out = torch.empty((m, n), dtype=torch.float32, device=a.device)
        unsure = torch.empty((1,), dtype=torch.int32, device=a.device)
        stride, sides = residual.stride(0) if residual is not None else 0, (bias, residual, scale)
        parts = (
            *(tiled.descriptor_of(x, a_block) for x in (a_high, a_low)),
            *(tiled.descriptor_of(x, b_block) for x in (b_high, b_low)),
        )
        ranges = (a_powers, b_powers, a_counts, b_counts, unsure, 1.0)
        launch(*parts, *ranges, out, *sides, m, n, k, n, stride, *constants)
        in_bfloat16(a, matrix_of(b), out, sides, unsure)
        return out

    return run


def _splitter(*, lines: int, depth: int, stride: int, by_lines: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """The launch of the kernel that splits one operand. Lines: rows of a, columns of b; `by_lines`: a line lies in one piece.

    It returns the parts (high, low), stored as the matrix is, the power of each line, and the counts of small numbers.
    """
    source = import_module("flatout.blocks.kernels.matmul.on_device.float32")
    rows, columns = (lines, depth) if by_lines else (depth, lines)
    own_stride = rounded_up(columns, _UNIT)
    width, length = (1, min(4096, tiled.power_of_two(depth))) if by_lines else (32, 64)
    strides = (stride, 1, own_stride, 1) if by_lines else (1, stride, 1, own_stride)
    launch = TritonLaunch(source.split_into_halves, ceil(lines / width), num_warps=4, num_stages=2)

    def split(matrix: Tensor) -> tuple[Tensor, ...]:
        whole = torch.empty((2, rows, own_stride), dtype=torch.float16, device=matrix.device)
        high, low = whole[0, :, :columns], whole[1, :, :columns]
        powers = torch.empty((lines,), dtype=torch.int32, device=matrix.device)
        counts = torch.zeros((2,), dtype=torch.int32, device=matrix.device)
        launch(matrix, high, low, powers, counts, lines, depth, *strides, width, length)
        return high, low, powers, counts

    return split


KERNEL: Final = matmul_kernel(
    "float16x3",
    "float32 accuracy from three float16 products",
    bind,
    order=40,
    refusal=refusal,
    variants=lambda problem: tuple(Variant(name="float16x3", tile=tile) for tile in _TILES),
)
