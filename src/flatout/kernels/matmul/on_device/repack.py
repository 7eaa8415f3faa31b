"""A matrix laid out again, in Triton: torch's copy between rows that begin anywhere moves one number at a time.

Importing this needs Triton.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def repacked(x, out, rows, cols: tl.constexpr, L_x: tl.constexpr, all_rows, L_out: tl.constexpr, BC: tl.constexpr):
    """out (all_rows, L_out) = x (rows, cols), whose rows lie L_x apart, and zeros."""
    row, n = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    corner = tl.cast(row, tl.int64)
    v = tl.load(x + corner * L_x + n, mask=(n < cols) & (row < rows), other=0.0)
    tl.store(out + corner * L_out + n, v, mask=(n < L_out) & (row < all_rows))
