"""Triton: matrices cast to float8; the gradient of logits in tiles, written as it lies and with rows and columns exchanged.

The units of Hopper multiply float8 only where both factors lie along the inner dimension, and each matrix here is a factor of
two products with different ones.

C tokens of a chunk, V vocabulary. This folder has no __init__.py, so that the registry's search passes it by.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast_rows(matrix_RK, scale, out_RK, num_columns, row_stride, largest, BLOCK: tl.constexpr):
    """A matrix over its scale, saturated, in the format of the output, which is dense."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(matrix_RK + row * row_stride + k, mask=k < num_columns, other=0.0).to(tl.float32) / tl.load(scale)
    values = tl.where(values > largest, largest, tl.where(values < -largest, -largest, values))
    tl.store(out_RK + row * num_columns + k, values.to(out_RK.dtype.element_ty), mask=k < num_columns)


@triton.jit
def gradient_twice(
    logits_CV,
    targets_C,
    scales_C,
    norms_C,
    step,
    out_CV,
    out_VC,
    num_tokens,
    vocabulary,
    row_stride,
    ignore_index,
    label_smoothing,
    z_loss,
    cap,
    HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of logits from their logsumexps, over `step`, in the format of the outputs.

    Outputs are dense, of `row_stride` columns; those behind the vocabulary, and rows of tokens that are ignored, become zeros.
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    r, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = row + r < num_tokens
    is_inside = is_row[:, None] & (column + k < row_stride)[None, :]
    corner = row * row_stride + column
    at = r[:, None] * row_stride + k[None, :]  # 32 bits are enough within a tile
    raw = tl.load(logits_CV + corner + at, mask=is_inside, other=0.0)
    targets = tl.load(targets_C + row + r, mask=is_row, other=ignore_index)
    is_counted = is_row & (targets != ignore_index)
    norms = tl.load(norms_C + row + r, mask=is_counted, other=0.0)
    scales = tl.load(scales_C + row + r, mask=is_counted, other=0.0) / tl.load(step)
    places = (targets - column).to(tl.int32)
    z = raw.to(tl.float32)
    if HAS_CAP:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    gradient = (scales * (1.0 + 2.0 * z_loss * norms))[:, None] * tl.exp(z - norms[:, None])
    if HAS_SMOOTHING:
        gradient -= (scales * label_smoothing / vocabulary)[:, None]
    is_target = k[None, :] == places[:, None]
    gradient -= tl.where(is_target, (scales * (1.0 - label_smoothing))[:, None], 0.0)
    if HAS_CAP:
        gradient *= 1.0 - (z / cap) * (z / cap)
    gradient = tl.where(is_counted[:, None] & (column + k < vocabulary)[None, :], gradient, 0.0)
    tl.store(out_CV + corner + at, gradient.to(out_CV.dtype.element_ty), mask=is_inside)
    exchanged = tl.trans(gradient).to(out_VC.dtype.element_ty)
    out_VC += column * num_tokens + row
    tl.store(out_VC + k[:, None] * num_tokens + r[None, :], exchanged, mask=tl.trans(is_inside))
