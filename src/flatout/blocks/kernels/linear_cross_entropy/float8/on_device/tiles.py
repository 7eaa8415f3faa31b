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
def _gradient(
    z, scales, norms, label_smoothing, z_loss, vocabulary, cap, HAS_CAP: tl.constexpr, HAS_SMOOTHING: tl.constexpr
):
    """The gradient of logits that are not their token's target."""
    if HAS_CAP:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    gradient = scales * (1.0 + 2.0 * z_loss * norms) * tl.exp2(z * 1.4426950408889634 - norms * 1.4426950408889634)
    if HAS_SMOOTHING:
        gradient -= scales * label_smoothing / vocabulary
    slope = z
    if HAS_CAP:
        slope = 1.0 - (z / cap) * (z / cap)
        gradient *= slope
    return gradient, slope


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
    IS_EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of logits from their logsumexps, over `step`, in the format of the outputs, as if no class were a target.

    Outputs are dense, of `row_stride` columns, a multiple of COLUMNS; what is behind the vocabulary counts for nothing. Rows of
    tokens that are ignored become zeros. With IS_EVEN the tokens are a multiple of ROWS. float16 in between has the exponents of
    e5m2 and eight bits more.
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    r, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row = row + r < num_tokens
    corner = row * row_stride + column
    at = r[:, None] * row_stride + k[None, :]  # 32 bits are enough within a tile
    if IS_EVEN:
        raw = tl.load(logits_CV + corner + at)
        targets = tl.load(targets_C + row + r)
    else:
        raw = tl.load(logits_CV + corner + at, mask=is_row[:, None], other=0.0)
        targets = tl.load(targets_C + row + r, mask=is_row, other=ignore_index)
    is_counted = targets != ignore_index
    norms = tl.load(norms_C + row + r, mask=is_counted, other=1e30)  # so that the exponential is 0
    scales = tl.load(scales_C + row + r, mask=is_counted, other=0.0) / tl.load(step)
    z = raw.to(tl.float32)
    options = (label_smoothing, z_loss, vocabulary, cap)
    gradient, _ = _gradient(z, scales[:, None], norms[:, None], *options, HAS_CAP, HAS_SMOOTHING)
    half = gradient.to(tl.float16)
    exchanged = tl.trans(half)
    out_VC += column * num_tokens + row
    beside = k[:, None] * num_tokens + r[None, :]
    if IS_EVEN:
        tl.store(out_CV + corner + at, half.to(out_CV.dtype.element_ty))
        tl.store(out_VC + beside, exchanged.to(out_VC.dtype.element_ty))
    else:
        tl.store(out_CV + corner + at, half.to(out_CV.dtype.element_ty), mask=is_row[:, None])
        tl.store(out_VC + beside, exchanged.to(out_VC.dtype.element_ty), mask=is_row[None, :])


@triton.jit
def gradient_of_targets(
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
    BLOCK: tl.constexpr,
):
    """The gradient of the logits that are their token's target, written over what `gradient_twice` has made of them."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    targets = tl.load(targets_C + rows, mask=rows < num_tokens, other=ignore_index)
    is_class = (rows < num_tokens) & (targets != ignore_index) & (targets >= 0) & (targets < vocabulary)
    z = tl.load(logits_CV + rows * row_stride + targets, mask=is_class, other=0.0).to(tl.float32)
    norms = tl.load(norms_C + rows, mask=is_class, other=0.0)
    scales = tl.load(scales_C + rows, mask=is_class, other=0.0) / tl.load(step)
    options = (label_smoothing, z_loss, vocabulary, cap)
    gradient, slope = _gradient(z, scales, norms, *options, HAS_CAP, HAS_SMOOTHING)
    wanted = scales * (1.0 - label_smoothing)
    if HAS_CAP:
        wanted *= slope
    small = (gradient - wanted).to(tl.float16).to(out_CV.dtype.element_ty)
    tl.store(out_CV + rows * row_stride + targets, small, mask=is_class)
    tl.store(out_VC + targets * num_tokens + rows, small, mask=is_class)
