"""Triton: pairs of all heads of a token, turned by one program.

B batch, T tokens, N heads, H head dim, R pairs of a head, L positions. This folder has no __init__.py, so that the registry's
search passes it by: it is imported when it is run, and only where there is Triton.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    x_BTNH,
    cos_LR,
    sin_LR,
    positions,
    rotated_BTNH,
    x_stride_b,
    x_stride_t,
    x_stride_n,
    cos_stride,
    sin_stride,
    position_stride_b,
    position_stride_t,
    num_tokens,
    num_heads,
    num_pairs,
    num_positions,
    HAS_POSITIONS: tl.constexpr,
    IS_HALF: tl.constexpr,
    IS_BACK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One token and some heads a program. A position outside of the tables makes NaN; nothing outside of them is read."""
    token = tl.program_id(0).to(tl.int64)
    b, t = token // num_tokens, token % num_tokens
    position = t
    if HAS_POSITIONS:
        position = tl.load(positions + b * position_stride_b + t * position_stride_t).to(tl.int64)
    pairs = tl.arange(0, BLOCK_R)
    is_pair = pairs < num_pairs
    is_known = is_pair & (position >= 0) & (position < num_positions)
    cos = tl.load(cos_LR + position * cos_stride + pairs, mask=is_known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(sin_LR + position * sin_stride + pairs, mask=is_known, other=float("nan")).to(tl.float32)[None, :]
    if IS_BACK:
        sin = -sin
    heads = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_head = (heads < num_heads)[:, None]
    x_N = x_BTNH + b * x_stride_b + t * x_stride_t + heads[:, None] * x_stride_n
    rotated_N = rotated_BTNH + (token * num_heads + heads[:, None]) * (2 * num_pairs)
    if IS_HALF:
        mask = is_head & is_pair[None, :]
        left = tl.load(x_N + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        right = tl.load(x_N + num_pairs + pairs[None, :], mask=mask, other=0.0).to(tl.float32)
        kind = rotated_BTNH.dtype.element_ty
        tl.store(rotated_N + pairs[None, :], (left * cos - right * sin).to(kind), mask=mask)
        tl.store(rotated_N + num_pairs + pairs[None, :], (right * cos + left * sin).to(kind), mask=mask)
    else:
        # Neighbours are loaded together and parted in registers, so that memory is read in whole lines.
        at = tl.arange(0, 2 * BLOCK_R)[None, :]
        mask = is_head & (at < 2 * num_pairs)
        x = tl.load(x_N + at, mask=mask, other=0.0).to(tl.float32)
        left, right = tl.split(tl.reshape(x, (BLOCK_N, BLOCK_R, 2)))
        rotated = tl.reshape(tl.join(left * cos - right * sin, right * cos + left * sin), (BLOCK_N, 2 * BLOCK_R))
        tl.store(rotated_N + at, rotated.to(rotated_BTNH.dtype.element_ty), mask=mask)
