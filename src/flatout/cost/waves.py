"""Thread blocks on streaming multiprocessors: how many fit, and what the last, partly filled round of them wastes."""

from __future__ import annotations

from math import ceil
from typing import Final

from flatout.errors import UsageError

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


def wave_efficiency(*, num_blocks: int, slots: int) -> float:
    """Mean share of the device's `slots` (multiprocessors times resident blocks) in use while equal blocks run in rounds.

    Below one full round it is 1: a small launch is a matter of too little work, not of the last round.

    >>> wave_efficiency(num_blocks=133, slots=132), wave_efficiency(num_blocks=100, slots=132)
    (0.5037878787878788, 1.0)
    """
    if num_blocks < 1 or slots < 1:
        raise UsageError(f"num_blocks {num_blocks} and slots {slots} must be at least 1")
    if num_blocks <= slots:
        return 1.0
    return num_blocks / (ceil(num_blocks / slots) * slots)
