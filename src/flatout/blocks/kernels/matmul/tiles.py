"""The tiles worth measuring, from the device's description: a guess, ranked by a model, that a measurement confirms.

The model counts rounds of programs over the multiprocessors and the bytes that must come from memory. It need not be right, only
have the best tile among the first dozen.
"""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import Final, NamedTuple

import torch
from msgspec import structs

from flatout.blocks.kernels.matmul.packing import rounded_up, row_unit
from flatout.blocks.kernels.matmul.problem import MatmulProblem
from flatout.blocks.kernels.matmul.variant import Loads, Tile

_RESERVED: Final = 8 * 1024
"""Shared memory, bytes a program: barriers, and what the compiler needs to convert layouts."""
_LEVELS: Final = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.85, (64, 256): 0.8, (256, 64): 0.8, (64, 128): 0.65}
"""Share of the matrix units' rate by tile, H200: larger tiles read less shared memory an operation. Others get a quarter."""
_FEWEST_BLOCKS: Final = 4
"""Steps along the depth below which a pipeline never fills."""
_LEAST_WGMMA: Final = 64
"""Rows of the smallest tile that Hopper's matrix instructions take from shared memory (PTX ISA, wgmma); below, descriptors
gain nothing."""
_MOST_SPLITS: Final = 128
_MOST_STAGES: Final = 8
_LATENCY_BYTES: Final = 64 * 1024
"""In flight for each multiprocessor, for memory to be busy: 4.3 TB/s for about 2 us under load, over 132 of them (H200)."""
_LARGE: Final = 128
"""Tiles of so many rows and columns keep the matrix units busy with a short pipeline; smaller ones wait for memory, and want
more."""
_SPLIT_S: Final = 3e-6
"""A second kernel after the first: its launch and drain. Half of it where parts meet in the same launch."""


class Device(NamedTuple):
    """What tiles depend on of a device; rates are for ranking alone."""

    num_sms: int
    shared_bytes: int
    flop_per_s: float = 8e14
    bytes_per_s: float = 4e12
    cache_bytes_per_s: float = 5e12


def described(device: torch.device) -> Device:
    """The description of a device that CUDA reports."""
    facts = torch.cuda.get_device_properties(device)
    shared_bytes: int = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(num_sms=facts.multi_processor_count, shared_bytes=shared_bytes)


def propose_tiles(problem: MatmulProblem, device: Device, *, most: int = 12) -> tuple[Tile, ...]:
    """The tiles that the model likes best, the best first, of each size of tile the best few."""
    ranked = sorted(candidate_tiles(problem, device), key=lambda tile: predicted_s(problem, tile, device))
    best: list[Tile] = []
    for alike_most in (1, 2):  # first one depth of the pipeline for each, then another
        for tile in ranked:
            alike = sum(_but_for_stages(t) == _but_for_stages(tile) for t in best)
            of_size = sum((t.m, t.n) == (tile.m, tile.n) for t in best)
            if (
                tile not in best
                and alike < alike_most
                and of_size < 3 * alike_most
                and len(best) < most * alike_most // 2 + 1
            ):
                best.append(tile)
    return tuple(best[:most])


def _but_for_stages(tile: Tile) -> Tile:
    return structs.replace(tile, stages=0)


def candidate_tiles(problem: MatmulProblem, device: Device) -> list[Tile]:
    """Every tile that fits the shared memory and wastes no more than half of itself."""
    found = []
    can_describe = problem.k * problem.dtype.itemsize >= 16 and problem.n * problem.dtype.itemsize >= 16
    plain: Loads = "pointer" if is_aligned(problem) else "aligned"
    kinds: tuple[Loads, ...] = ("descriptor", plain, *(["pointer"] if plain == "aligned" else []))  # type: ignore[arg-type]
    for m, n, loads in product((16, 32, 64, 128, 256), (32, 64, 128, 256), kinds):
        is_descriptor = loads == "descriptor"
        if is_descriptor and not (can_describe and m >= _LEAST_WGMMA):
            continue
        least = _LEAST_WGMMA if is_descriptor else 16
        if m >= 2 * max(problem.m, least) or n >= 2 * max(problem.n, 32) or m * n > 128 * 256:
            continue
        if m < _LEAST_WGMMA < problem.m:
            continue
        found += _of_size(problem, device, m, n, loads)
    return found


def predicted_s(problem: MatmulProblem, tile: Tile, device: Device) -> float:
    """Seconds of a product with this tile, by the model."""
    programs = ceil(problem.m / tile.m) * ceil(problem.n / tile.n) * tile.splits
    depth = ceil(problem.k / tile.splits)
    level = _LEVELS.get((tile.m, tile.n), 0.25) * (1.0 if tile.loads == "descriptor" else 0.9)
    rounds = ceil(programs / device.num_sms)
    compute_s = rounds * 2.0 * tile.m * tile.n * depth / (device.flop_per_s / device.num_sms * level)
    busy = min(1.0, programs / device.num_sms) * min(
        1.0, _bytes_in_flight(problem, tile, device, programs) / _LATENCY_BYTES
    )
    memory_s = problem.traffic_bytes / (device.bytes_per_s * busy)
    reads = problem.m * problem.k * ceil(problem.n / tile.n) + problem.n * problem.k * ceil(problem.m / tile.m)
    cache_s = reads * problem.dtype.itemsize / (device.cache_bytes_per_s * busy)
    split_s = (tile.splits > 1) * (
        _SPLIT_S / (1 + tile.is_single) + 8.0 * tile.splits * problem.m * problem.n / device.bytes_per_s
    )
    return max(compute_s, memory_s, cache_s) + split_s


def tile_shared_bytes(tile: Tile, dtype: torch.dtype) -> int:
    """Shared memory, in bytes, that the pipeline's stages of one program take."""
    return (tile.m + tile.n) * tile.k * dtype.itemsize * tile.stages


def _bytes_in_flight(problem: MatmulProblem, tile: Tile, device: Device, programs: int) -> float:
    """Bytes that one multiprocessor waits for: all stages of a pipeline but the one that is worked on."""
    at_once = min(_resident(tile, problem.dtype, device), ceil(programs / device.num_sms))
    return at_once * tile_shared_bytes(tile, problem.dtype) * (1 - 1 / tile.stages)


def _resident(tile: Tile, dtype: torch.dtype, device: Device) -> int:
    """Programs that a multiprocessor holds at once: by shared memory, and by registers, of which a warp may need a sixteenth."""
    return max(1, min(device.shared_bytes // (tile_shared_bytes(tile, dtype) + _RESERVED), 16 // tile.warps))


def _of_size(problem: MatmulProblem, device: Device, m: int, n: int, loads: Loads) -> list[Tile]:
    is_small = m < 64
    tiles = ceil(problem.m / m) * ceil(problem.n / n)
    warps = 8 if m * n >= 128 * 128 else 4
    found = []
    depths = (64, 128, 256) if is_small else (64, 128) if m * n <= 64 * 128 else (64,)
    for k in depths:
        if k > rounded_up(problem.k, 64) or (is_small and k == 64 and problem.k > 64):
            continue
        blocks = ceil(problem.k / k)
        for splits in _splits(tiles, blocks, device.num_sms):
            tile = Tile(m=m, n=n, k=k, stages=1, warps=warps, splits=splits, loads=loads)
            stages = min((device.shared_bytes - _RESERVED) // tile_shared_bytes(tile, problem.dtype), _MOST_STAGES)
            stages = min(stages, ceil(blocks / splits) + 1)
            if stages < 2:
                continue
            persists = loads == "descriptor" and splits == 1 and tiles > device.num_sms
            for count in sorted({stages, min(stages, 4 if is_small else 3)}, reverse=m < _LARGE or n < _LARGE):
                one = Tile(m=m, n=n, k=k, stages=count, warps=warps, splits=splits, loads=loads)
                found += [one, *([structs.replace(one, is_persistent=True)] * persists)]
                if splits > 1 and tiles * splits <= device.num_sms * _resident(one, problem.dtype, device):
                    found.append(structs.replace(one, is_single=True))
    return found


def _splits(tiles: int, blocks: int, num_sms: int) -> list[int]:
    """1, and the powers of two that bring as many programs as there are multiprocessors, half and twice as many."""
    most = max(1, min(_MOST_SPLITS, blocks // _FEWEST_BLOCKS))
    wanted = {1 << s for s in range(9) if num_sms // 2 <= (tiles << s) <= 2 * num_sms + num_sms // 2}
    return sorted({1, *(s for s in wanted if s <= most)})


def is_aligned(problem: MatmulProblem) -> bool:
    """Whether both operands' rows begin at multiples of 16 bytes as they are."""
    unit = row_unit(problem.dtype)
    return problem.a_stride % unit == 0 and problem.b_stride % unit == 0
