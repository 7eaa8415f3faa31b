"""A float32 product from six products of bfloat16 parts, which have float32's range and are split in registers.

Where float32 gives infinity or NaN these give NaN.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from math import ceil
from typing import Final

import torch
from msgspec import structs
from torch import Tensor

from flatout.blocks.kernels.matmul import triton as tiled
from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.packing import Matrix, matrix_of
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.variant import Runner, Tile, Variant
from flatout.blocks.kernels.opaque import Side

_TILES: Final = (
    Tile(m=128, n=64, k=32, stages=3, warps=4),
    Tile(m=128, n=128, k=32, stages=3, warps=8),
    Tile(m=64, n=64, k=32, stages=4, warps=4),
)


def variants(problem: MatmulProblem) -> tuple[Variant, ...]:
    """Tiles that leave registers for three parts of each operand."""
    loads = "descriptor" if problem.a_stride % 4 == 0 and problem.b_stride % 4 == 0 else "pointer"
    return tuple(Variant(name="bfloat16x6", tile=structs.replace(tile, loads=loads)) for tile in _TILES)


def refusal(problem: MatmulProblem) -> str | None:
    """Why there is no product of float32 accuracy from products of coarser types."""
    if problem.precision != "float32":
        return "float32 accuracy is not asked for (precision='float32')"
    if problem.out_dtype != torch.float32:
        return f"the result is to be {problem.out_dtype}, not float32"
    return tiled.refusal(problem._replace(precision=None, dtype=torch.bfloat16))


def bind(problem: MatmulProblem, variant: Variant) -> Runner:
    """Compiles at the first call."""
    assert variant.tile is not None
    product, (m, n, _) = bfloat16_launch(problem, variant.tile), problem.sizes

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        out = torch.empty((m, n), dtype=torch.float32, device=a.device)
        product(a, matrix_of(b), out, (bias, residual, scale), None)
        return out

    return run


def bfloat16_launch(problem: MatmulProblem, tile: Tile) -> Callable[..., None]:
    """The launch (a, b, out, sides, unsure) of the product in bfloat16 parts, which does nothing where `unsure` holds 0."""
    source = import_module("flatout.blocks.kernels.matmul.on_device.float32")
    language = import_module("triton.language")
    (m, n, k), activation = problem.sizes, tiled.epilogue_constants(problem)[:2]
    launch = tiled.launch_of(source.bfloat16_products, ceil(m / tile.m) * ceil(n / tile.n), tile)
    blocks = tiled.stored_blocks(problem, tile) if tile.loads == "descriptor" else None
    sizes = (m, n, k, problem.a_stride, problem.b_stride, n)
    # the interpreter gets bfloat16 wrong
    dtype = language.float32 if tiled.is_interpreted(problem) else language.bfloat16
    layout = (not problem.a_rows, not problem.b_rows, blocks is not None)
    constants = (*layout, *activation, dtype, *tile.sizes, tile.group)

    def run(a: Tensor, b: Tensor, out: Tensor, sides: tuple[Side, Side, Side], unsure: Side) -> None:
        x: object = a
        y: object = b
        if blocks is not None:
            x = tiled.descriptor_of(a if problem.a_rows else a.T, blocks[0])
            y = tiled.descriptor_of(b if problem.b_rows else b.T, blocks[1])
        stride = sides[1].stride(0) if sides[1] is not None else 0
        launch(x, y, unsure, 1.0, out, *sides, *sizes, stride, *constants)

    return run


KERNEL: Final = matmul_kernel(
    "bfloat16x6", "float32 accuracy from six bfloat16 products", bind, order=45, refusal=refusal, variants=variants
)
