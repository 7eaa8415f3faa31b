"""How long a device takes for a product of matrices: rounds of tiles over its multiprocessors, or the bytes that must move."""

# M rows of the result, N columns of it, K depth

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

TILES: Final = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.7), (64, 64, 0.5))
"""Rows and columns of the tiles that libraries have, and what share of the largest one's rate each reaches: a tile of m x n reads
(m + n) numbers of each operand for 2 m n operations, and half as large tiles wait twice as often for shared memory."""
_ALIGNED: Final = 8
"""Numbers of two bytes in the 16 bytes at which rows must begin for the widest loads."""


class Rates(NamedTuple):
    """What one device does: `flop_per_s` of products, `bytes_per_s` of memory, on so many multiprocessors."""

    flop_per_s: float
    bytes_per_s: float
    num_units: int
    fill_depth: float
    misaligned_share: float
    kernel_s: float


def product_s(rates: Rates, m: int, n: int, k: int, *, batch: int = 1, itemsize: int = 2) -> float:
    """Seconds of `batch` products (M, K) @ (K, N): the best tile's rounds, no faster than memory, and the kernel's start.

    A tile of one round takes 2 m n (K + fill_depth) operations of one multiprocessor's share of the rate.

    >>> rates = Rates(3e14, 1.5e12, 108, 0.0, 1.0, 0.0)
    >>> round(product_s(rates, 256, 128 * 108, 1024) * 3e14 / (2 * 256 * 128 * 108 * 1024), 6)
    1.0
    """
    unit_flop_per_s = rates.flop_per_s / rates.num_units
    best = min(
        ceil(batch * ceil(m / rows) * ceil(n / columns) / rates.num_units)
        * (2.0 * rows * columns * (k + rates.fill_depth) / (unit_flop_per_s * share))
        for rows, columns, share in TILES
    )
    if n % _ALIGNED or k % _ALIGNED:
        best /= rates.misaligned_share
    memory_s = batch * itemsize * (m * k + k * n + m * n) / rates.bytes_per_s
    return max(best, memory_s) + rates.kernel_s
