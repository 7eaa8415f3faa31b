"""Tiles and thread blocks on multiprocessors: how many fit, what the last round of them wastes, how long a product takes."""

# M rows of a product's result, N columns of it, K depth

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

from flatout.core.errors import UsageError

TILES: Final = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 64, 0.5))
"""Rows and columns of the tiles that libraries have, and what share of the largest one's rate each reaches: a tile of m x n reads
(m + n) numbers of each operand for 2 m n operations, and half as large tiles wait twice as often for shared memory."""
_LARGEST: Final = TILES[0][0] * TILES[0][1]
_ALIGNED: Final = 8
"""Numbers of two bytes in the 16 bytes at which rows must begin for the widest loads."""
_REGISTER_UNIT: Final = 256
"""Registers are given to a warp in units of 256 (CUDA C++ Programming Guide, compute capabilities 3.x to 10.x)."""
_SYSTEM_SHARED_BYTES: Final = 1024
"""Shared memory that the system keeps for each block from compute capability 8.0 on."""
_MOST_BLOCKS: Final = 32
"""Most blocks on one multiprocessor (16 on 8.6 and 8.9, 24 on 12.0: the limit of threads binds there first for usual blocks)."""
_WARP: Final = 32


def resident_blocks(
    *,
    block_threads: int,
    registers: int,
    shared_bytes: int,
    threads_per_sm: int,
    registers_per_sm: int,
    shared_bytes_per_sm: int,
) -> int:
    """Blocks of a kernel that one multiprocessor holds at once; at least 1, since the kernel ran.

    `registers` are those of one thread, `shared_bytes` those of one block.

    >>> resident_blocks(block_threads=256, registers=64, shared_bytes=0, threads_per_sm=2048, registers_per_sm=65536,
    ...                 shared_bytes_per_sm=233472)
    4
    """
    if block_threads < 1:
        raise UsageError(f"block_threads {block_threads} must be at least 1")
    warps = ceil(block_threads / _WARP)
    limits = [_MOST_BLOCKS, threads_per_sm // (warps * _WARP)]
    if registers:
        a_warp = ceil(registers * _WARP / _REGISTER_UNIT) * _REGISTER_UNIT
        limits.append(registers_per_sm // (a_warp * warps))
    if shared_bytes:
        limits.append(shared_bytes_per_sm // (shared_bytes + _SYSTEM_SHARED_BYTES))
    return max(1, min(limits))


def wave_efficiency(*, num_blocks: int, num_resident: int) -> float:
    """Mean share of a device that equal blocks use while they run in rounds.

    `num_resident` blocks run at once: multiprocessors times the resident blocks of one.
    Below one full round it is 1: a small launch is a matter of too little work, not of the last round.

    >>> wave_efficiency(num_blocks=133, num_resident=132), wave_efficiency(num_blocks=100, num_resident=132)
    (0.5037878787878788, 1.0)
    """
    if num_blocks < 1 or num_resident < 1:
        raise UsageError(f"num_blocks {num_blocks} and num_resident {num_resident} must be at least 1")
    if num_blocks <= num_resident:
        return 1.0
    return num_blocks / (ceil(num_blocks / num_resident) * num_resident)


class Rates(NamedTuple):
    """What one device does: `flop_per_s` of products, `bytes_per_s` of memory, on so many multiprocessors."""

    flop_per_s: float
    bytes_per_s: float
    num_units: int
    fill_s: float
    misaligned_share: float
    kernel_s: float


def product_s(
    rates: Rates, m: int, n: int, k: int, *, batch: int = 1, itemsize: float = 2, result_bytes: float | None = None
) -> float:
    """Seconds of `batch` products (M, K) @ (K, N): the best tile's rounds, no faster than memory, and the kernel's start.

    A tile of one round takes 2 m n K operations of one multiprocessor's share of the rate, and `fill_s` besides, or as much less
    as it is smaller than the largest: until its first numbers have come and its last are written, whatever the rate of
    arithmetic is. Each number of the result takes `result_bytes` of traffic, `itemsize` where that is None.

    >>> rates = Rates(3e14, 1.5e12, 108, 0.0, 1.0, 0.0)
    >>> round(product_s(rates, 256, 128 * 108, 1024) * 3e14 / (2 * 256 * 128 * 108 * 1024), 6)
    1.0
    """
    unit_flop_per_s = rates.flop_per_s / rates.num_units
    best = min(
        ceil(batch * ceil(m / rows) * ceil(n / columns) / rates.num_units)
        * rows
        * columns
        * (2.0 * k / unit_flop_per_s + rates.fill_s / _LARGEST)
        / share
        for rows, columns, share in TILES
    )
    if n % _ALIGNED or k % _ALIGNED:
        best /= rates.misaligned_share
    result = itemsize if result_bytes is None else result_bytes
    memory_s = batch * (itemsize * (m * k + k * n) + result * m * n) / rates.bytes_per_s
    return max(best, memory_s) + rates.kernel_s
