"""The product in Triton, bound to one problem: compiled once, launched with as little work on the host as there can be."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import ceil
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.implementation import matmul_kernel
from flatout.blocks.kernels.matmul.launch import Counters, TritonLaunch, enter, scratch, stream_now
from flatout.blocks.kernels.matmul.packing import Matrix, derived_from, matrix_of, rounded_up, row_unit
from flatout.blocks.kernels.matmul.padding import with_aligned_rows
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.reference import LARGEST
from flatout.blocks.kernels.matmul.tiles import Device, described, propose_tiles
from flatout.blocks.kernels.matmul.variant import Runner, Tile, Variant
from flatout.blocks.kernels.nvrtc import has_early_launches
from flatout.blocks.kernels.opaque import Side

_DTYPES: Final = (torch.bfloat16, torch.float16)
_OUTS: Final = (*_DTYPES, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_INTERPRETED: Final = Device(num_sms=4, shared_bytes=227 * 1024)
"""Stands for a device in Triton's interpreter: few multiprocessors, so that small tests take several rounds."""


def refusal(problem: MatmulProblem) -> str | None:
    """Why the Triton kernel cannot run this problem."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if problem.device.type != "cuda":
        return f"the operands are on '{problem.device}'; Triton's kernels run on GPUs"
    if problem.precision is not None:
        return "precision 'float32' has kernels of its own"
    if problem.dtype not in _DTYPES:
        return f"operands are {problem.dtype}; matrix units take bfloat16 and float16 here"
    if problem.out_dtype not in _OUTS:
        return f"the result is to be {problem.out_dtype}"
    if min(problem.m, problem.n, problem.k) == 0:
        return "there is nothing to multiply"
    return None


def is_interpreted(problem: MatmulProblem) -> bool:
    """Whether kernels run in Triton's interpreter: nothing else runs them on a CPU."""
    return problem.device.type == "cpu"


def device_of(problem: MatmulProblem) -> Device:
    """The description of the device that tiles are proposed for."""
    return _INTERPRETED if is_interpreted(problem) else described(problem.device)


def bind(problem: MatmulProblem, tile: Tile) -> Runner:
    """Compiles at the first call; raises what Triton raises when the tile does not fit."""
    source = import_module("flatout.blocks.kernels.matmul.on_device.product")
    by_descriptor, splits, (m, n, k) = tile.loads == "descriptor", tile.splits, problem.sizes
    unit = row_unit(problem.dtype)
    align_a = partial(with_aligned_rows, by_rows=problem.a_rows, rows=m, columns=k, unit=unit)
    align_b = partial(with_aligned_rows, by_rows=problem.b_rows, rows=k, columns=n, unit=unit)
    aligns_a = tile.loads != "pointer" and problem.a_stride % unit != 0
    aligns_b = (tile.loads != "pointer" or problem.is_constant) and problem.b_stride % unit != 0
    a_rows, b_rows, (a_block, b_block) = problem.a_rows, problem.b_rows, stored_blocks(problem, tile)
    a_stride = rounded_up(k if a_rows else m, unit) if aligns_a else problem.a_stride
    b_stride = rounded_up(n if b_rows else k, unit) if aligns_b else problem.b_stride
    out_stride = rounded_up(n, unit) if problem.strides == "any" else n
    tiles = ceil(m / tile.m) * ceil(n / tile.n)
    programs = min(tiles, device_of(problem).num_sms) if tile.is_persistent else tiles * splits
    is_early = has_early_launches(problem.device)
    launch = launch_of(source.product, programs, tile, is_early=is_early)
    join = TritonLaunch(source.add_parts_of_all, tiles * splits, num_warps=4, num_stages=1, **early(is_early))
    counters = Counters(tiles, problem.device) if tile.is_single else None
    finishing = epilogue_constants(problem)
    layout = (not a_rows, not b_rows, by_descriptor)
    fixed = (n, k, a_stride, b_stride, out_stride)
    tail = (*layout, *finishing, *tile.sizes, splits, tile.group, tile.is_persistent, is_early)
    join_tail = (*finishing, tile.m, tile.n, splits, tile.group, is_early)
    is_cuda = problem.device.type == "cuda"
    out_dtype, device, size = problem.out_dtype, problem.device, tiles * splits * tile.m * tile.n

    def run(a: Tensor, b: Matrix, bias: Side, residual: Side, scale: Side) -> Tensor:
        left = align_a(a) if aligns_a else a
        right: Any = derived_from(b, "aligned", align_b) if aligns_b else matrix_of(b)
        out = whole = torch.empty((m, out_stride), dtype=out_dtype, device=device)
        if out_stride != n:
            out = whole[:, :n]
        x: object = left
        y: object = right
        if by_descriptor:
            if (left.data_ptr() | right.data_ptr()) & 15:  # strides suffice, and the tensors begin elsewhere
                left, right = align_a(left), align_b(right)
            x = descriptor_of(left if a_rows else left.T, a_block)
            y = descriptor_of(right if b_rows else right.T, b_block)
        side = residual.stride(0) if residual is not None else 0
        if splits == 1:
            launch(x, y, whole, bias, residual, scale, None, None, m, *fixed, side, *tail)
            return out
        if counters is not None:
            stream = stream_now() if is_cuda else 0
            parts = scratch(size, device, stream)
            launch(x, y, whole, bias, residual, scale, parts, counters.of(stream), m, *fixed, side, *tail)
            return out
        # of this call alone: another thread's launch may come between these two
        parts = torch.empty((size,), dtype=torch.float32, device=device)
        launch(x, y, whole, None, None, None, parts, None, m, *fixed, 0, *tail)
        join(whole, bias, residual, scale, parts, m, n, out_stride, side, *join_tail)
        return out

    return run


def early(is_early: bool) -> dict[str, Any]:
    """The launch option for it, where `is_early`."""
    return {"launch_pdl": True} if is_early else {}


def launch_of(kernel: Any, num_programs: int, tile: Tile, *, is_early: bool = False) -> TritonLaunch:
    """The launch of a kernel that is compiled for a tile; `is_early`: it waits for the launch before it by itself."""
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, **early(is_early)}
    if tile.is_single:
        options["launch_cooperative_grid"] = True  # programs that wait for each other must all run at once
    return TritonLaunch(kernel, num_programs, **options)


def power_of_two(size: int) -> int:
    """The smallest power of two that is no smaller.

    >>> power_of_two(5), power_of_two(8)
    (8, 8)
    """
    return 1 << (size - 1).bit_length()


def epilogue_constants(problem: MatmulProblem) -> tuple[Any, ...]:
    """The constants ACTIVATION, ROW_SCALE, LARGEST of a kernel's epilogue."""
    activations = import_module("flatout.blocks.kernels.matmul.on_device.product").ACTIVATIONS
    by_rows = problem.epilogue.scale == "rows"
    return activations[problem.epilogue.activation], by_rows, LARGEST.get(problem.out_dtype)


def stored_blocks(problem: MatmulProblem, tile: Tile) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns that are read at a time, of each operand as it is stored."""
    a = (tile.m, tile.k) if problem.a_rows else (tile.k, tile.m)
    return a, ((tile.k, tile.n) if problem.b_rows else (tile.n, tile.k))


def descriptor_of(stored: Tensor, block: tuple[int, int]) -> object:
    """What the tensor memory accelerator needs to know of a matrix whose rows are contiguous."""
    enter(stored.device)
    descriptor = import_module("triton.tools.tensor_descriptor").TensorDescriptor
    return descriptor(stored, list(stored.shape), list(stored.stride()), list(block))


def _bind_variant(problem: MatmulProblem, variant: Variant) -> Runner:
    assert variant.tile is not None
    return bind(problem, variant.tile)


KERNEL: Final = matmul_kernel(
    "triton",
    "a Triton kernel whose epilogue is a function",
    _bind_variant,
    order=30,
    refusal=refusal,
    variants=lambda problem: tuple(
        Variant(name="triton", tile=tile) for tile in propose_tiles(problem, device_of(problem))
    ),
)
