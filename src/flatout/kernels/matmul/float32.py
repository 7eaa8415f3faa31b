"""Products of float32 accuracy on matrix units for coarser numbers: three float16 or six bfloat16 products for each.

Parts in bfloat16 have float32's range, and are split in registers. Parts in float16 are twice as fast and have not: lines of
the operands are scaled by powers of two, which is exact, and the device itself looks whether the range suffices; where it
does not, the product in bfloat16 follows in the same call, without the host's knowing. Where float32 gives infinity or NaN
these give NaN.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from importlib import import_module
from math import ceil
from typing import Any, Final

import torch
from msgspec import structs
from torch import Tensor

from flatout.kernels.matmul import tiled
from flatout.kernels.matmul.differentiable import run_kernel
from flatout.kernels.matmul.launching import Launch
from flatout.kernels.matmul.packing import Packed, made_of, matrix_of, rounded_up
from flatout.kernels.matmul.problem import Problem, problem_of
from flatout.kernels.matmul.way import Runner, Tile, Way
from flatout.records.kernel import Kernel

HALVES: Final = "float16x3"
WIDE: Final = "bfloat16x6"
_LEAST_DEPTH: Final = 1024
"""Float32's own error grows with the depth; with three float16 products it does not, and is the smaller from here on: sums of 264
positive numbers came out with 1.9e-7 against 0.7e-7, of 4096 with 2.1e-7 against 8.4e-7 (H200, rms over |a| @ |b|)."""
_HALF_TILES: Final = (
    Tile(m=128, n=128, k=64, stages=3, warps=8),
    Tile(m=128, n=128, k=32, stages=4, warps=8),
    Tile(m=64, n=128, k=64, stages=3, warps=4),
)
"""Two accumulators and two parts of each operand: a larger tile leaves the registers."""
_WIDE_TILES: Final = (
    Tile(m=128, n=64, k=32, stages=3, warps=4),
    Tile(m=128, n=128, k=32, stages=3, warps=8),
    Tile(m=64, n=64, k=32, stages=4, warps=4),
)
_UNIT: Final = 8
"""Float16 numbers of 16 bytes."""

Sides = tuple[Tensor | None, Tensor | None, Tensor | None]


def ways(problem: Problem) -> tuple[Way, ...]:
    """Three float16 products where they are as good as float32, and six of bfloat16."""
    loads = "descriptor" if problem.a_stride % 4 == 0 and problem.b_stride % 4 == 0 else "pointer"
    wide = (structs.replace(tile, loads=loads) for tile in _WIDE_TILES)
    halves = _HALF_TILES if problem.k >= _LEAST_DEPTH else ()
    return (*(Way(name=HALVES, tile=tile) for tile in halves), *(Way(name=WIDE, tile=tile) for tile in wide))


def refusal(problem: Problem) -> str | None:
    """Why there is no product of float32 accuracy by others."""
    if problem.precision != "float32":
        return "float32 accuracy is not asked for (precision='float32')"
    if problem.out_dtype != torch.float32:
        return f"the result is to be {problem.out_dtype}, not float32"
    return tiled.refusal(problem._replace(precision=None, dtype=torch.bfloat16))


def bind(problem: Problem, way: Way) -> Runner:
    """One of `ways`."""
    assert way.tile is not None
    return _bind_halves(problem, way.tile) if way.name == HALVES else _bind_wide(problem, way.tile)


def _bind_wide(problem: Problem, tile: Tile) -> Runner:
    product, (m, n, _) = _Wide(problem, tile), problem.sizes

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        out = torch.empty((m, n), dtype=torch.float32, device=a.device)
        product(a, matrix_of(b), out, (bias, residual, scale), None)
        return out

    return run


def _bind_halves(problem: Problem, tile: Tile) -> Runner:
    source = import_module("flatout.kernels.matmul.on_device.float32")
    m, n, k = problem.sizes
    split_a = _Split(lines=m, depth=k, stride=problem.a_stride, by_lines=problem.a_rows)
    split_b = _Split(lines=n, depth=k, stride=problem.b_stride, by_lines=not problem.b_rows)
    tiles = ceil(m / tile.m) * ceil(n / tile.n)
    launch = tiled.launch_of(source.product, tiles, tile)
    [wide, *_] = [way.tile for way in ways(problem) if way.name == WIDE and way.tile is not None]
    again = _Wide(problem, wide)
    a_block, b_block = tiled.blocks(problem, tile)
    activation, by_rows, _ = tiled.constants(problem)
    fixed = (not problem.a_rows, not problem.b_rows, activation, by_rows, *tile.sizes, tile.group)

    def run(
        a: Tensor, b: Tensor | Packed, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None
    ) -> Tensor:
        a_high, a_low, a_powers, a_counts = split_a(a)
        b_high, b_low, b_powers, b_counts = made_of(b, HALVES, split_b)
        out = torch.empty((m, n), dtype=torch.float32, device=a.device)
        unsure = torch.empty((1,), dtype=torch.int32, device=a.device)
        side, sides = residual.stride(0) if residual is not None else 0, (bias, residual, scale)
        parts = (
            *(tiled.descriptor_of(x, a_block) for x in (a_high, a_low)),
            *(tiled.descriptor_of(x, b_block) for x in (b_high, b_low)),
        )
        ranges = (a_powers, b_powers, a_counts, b_counts, unsure, 1.0)
        launch(*parts, *ranges, out, *sides, m, n, k, n, side, *fixed)
        again(a, matrix_of(b), out, sides, unsure)
        return out

    return run


class _Wide:
    """Launches the product in bfloat16 parts, which does nothing where `unsure` holds 0."""

    def __init__(self, problem: Problem, tile: Tile) -> None:
        source = import_module("flatout.kernels.matmul.on_device.float32")
        part = import_module("triton.language")
        (m, n, k), activation = problem.sizes, tiled.constants(problem)[:2]
        tiles = ceil(m / tile.m) * ceil(n / tile.n)
        self._launch = tiled.launch_of(source.wide_product, tiles, tile)
        self._blocks = tiled.blocks(problem, tile) if tile.loads == "descriptor" else None
        self._a_rows, self._b_rows = problem.a_rows, problem.b_rows
        self._sizes = (m, n, k, problem.a_stride, problem.b_stride, n)
        lies = (not problem.a_rows, not problem.b_rows, self._blocks is not None)
        dtype = part.float32 if tiled.is_interpreted(problem) else part.bfloat16  # which the interpreter gets wrong
        self._fixed = (*lies, *activation, dtype, *tile.sizes, tile.group)

    def __call__(self, a: Tensor, b: Tensor, out: Tensor, sides: Sides, unsure: Tensor | None) -> None:
        x: object = a
        y: object = b
        if self._blocks is not None:
            x = tiled.descriptor_of(a if self._a_rows else a.T, self._blocks[0])
            y = tiled.descriptor_of(b if self._b_rows else b.T, self._blocks[1])
        side = sides[1].stride(0) if sides[1] is not None else 0
        self._launch(x, y, unsure, 1.0, out, *sides, *self._sizes, side, *self._fixed)


class _Split:
    """Launches the kernel that splits one operand. Lines: rows of a, columns of b; `by_lines`: a line lies in one piece."""

    def __init__(self, *, lines: int, depth: int, stride: int, by_lines: bool) -> None:
        source = import_module("flatout.kernels.matmul.on_device.float32")
        self._lines, self._depth, self._by_lines = lines, depth, by_lines
        self._stride = rounded_up(depth if by_lines else lines, _UNIT)
        width, length = (1, min(4096, tiled.power_of_two(depth))) if by_lines else (32, 64)
        strides = (stride, 1, self._stride, 1) if by_lines else (1, stride, 1, self._stride)
        self._launch = Launch(source.split, ceil(lines / width), num_warps=4, num_stages=2)
        self._fixed = (depth, *strides, width, length)

    def __call__(self, matrix: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(high, low, powers, counts); high and low as the matrix is stored."""
        lines, depth = self._lines, self._depth
        shape = (lines, depth) if self._by_lines else (depth, lines)
        whole = torch.empty((2, shape[0], self._stride), dtype=torch.float16, device=matrix.device)
        high, low = whole[0, :, : shape[1]], whole[1, :, : shape[1]]
        powers = torch.empty((lines,), dtype=torch.int32, device=matrix.device)
        counts = torch.zeros((2,), dtype=torch.int32, device=matrix.device)
        self._launch(matrix, high, low, powers, counts, lines, *self._fixed)
        return high, low, powers, counts


def _refusal(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> str | None:
    return refusal(problem_of(a, b, *sides, **asked))


def _run(a: Tensor, b: Tensor, *sides: Tensor | None, **asked: Any) -> Tensor:
    return run_kernel(lambda problem: bind(problem, ways(problem)[0]), a, b, *sides, **asked)


KERNEL: Final = Kernel(
    id="matmul.float32_from_halves",
    op="matmul",
    title="float32 accuracy from three float16 or six bfloat16 products",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=40,
)
