"""A launch that begins while the one before it is still at its end (programmatic dependent launch), and what it does meanwhile.

It may touch nothing that the launch before may still write, but it may have the cache fetch from memory: what is written later
is written to the cache, so that every load sees it. Importing this needs Triton.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LINE: tl.constexpr = tl.constexpr(64)
"""Bytes that one instruction has fetched: what the cache of a GPU takes from memory at a time, where nothing else is set."""
FETCH: tl.constexpr = tl.constexpr("prefetch.global.L2 [$1]; mov.b32 $0, 0;")


@triton.jit
def begin(EARLY: tl.constexpr):
    """Waits for the launch before, if this one may be early, and lets the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_pair(a, b, row, col, k, M, N, K, L_a: tl.constexpr, L_b: tl.constexpr, A_COLUMNS: tl.constexpr,
               B_COLUMNS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Of both operands of the tile at (row, col) DEPTH numbers of the depth, from k."""
    if A_COLUMNS:
        fetch(a, k, row, K, M, L_a, DEPTH, BM)
    else:
        fetch(a, row, k, M, K, L_a, BM, DEPTH)
    if B_COLUMNS:
        fetch(b, col, k, N, K, L_b, BN, DEPTH)
    else:
        fetch(b, k, col, K, N, L_b, DEPTH, BN)


@triton.jit
def fetch(x, row, col, rows, cols, L: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """ROWS x COLS numbers of x from (row, col), into the cache that all multiprocessors share."""
    STEP: tl.constexpr = LINE // (x.dtype.element_ty.primitive_bitwidth // 8)
    LINES: tl.constexpr = (COLS + STEP - 1) // STEP
    r = tl.minimum(row + tl.arange(0, ROWS), rows - 1)[:, None]
    s = tl.minimum(col + tl.arange(0, LINES) * STEP, cols - 1)[None, :]
    at = (x + tl.cast(r, tl.int64) * L + s).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(FETCH, "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1)
