"""A copy of a matrix with another row stride, in Triton: torch's copy between unaligned rows moves one number at a time.

Importing this needs Triton.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def repack(x, out, rows, cols: tl.constexpr, L_x: tl.constexpr, all_rows, L_out: tl.constexpr, BC: tl.constexpr):
    """Copy x (rows, cols), with L_x from row to row, to out (all_rows, L_out), filled up with zeros."""
    row, n = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    corner = tl.cast(row, tl.int64)
    v = tl.load(x + corner * L_x + n, mask=(n < cols) & (row < rows), other=0.0)
    tl.store(out + corner * L_out + n, v, mask=(n < L_out) & (row < all_rows))
