"""Triton: RMS norm and layer norm over rows, with the sum before them, forward and backward.

R rows, D width. This folder has no __init__.py, so that the registry's search passes it by: it is imported when it is run, and
only where there is Triton.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _summed(x_D, residual_D, at, mask, HAS_RESIDUAL: tl.constexpr):
    """What is normed, in float32 but rounded as it is stored."""
    s = tl.load(x_D + at, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        r = tl.load(residual_D + at, mask=mask, other=0.0)
        s = (s.to(tl.float32) + r.to(tl.float32)).to(x_D.dtype.element_ty)
    return s.to(tl.float32)


@triton.jit
def _affine(u, weight_D, bias_D, at, mask, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):
    if HAS_WEIGHT:
        u = u * tl.load(weight_D + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        u = u + tl.load(bias_D + at, mask=mask, other=0.0).to(tl.float32)
    return u


@triton.jit
def norm_forward(
    x_RD,
    residual_RD,
    weight_D,
    bias_D,
    normed_RD,
    summed_RD,
    means_R,
    factors_R,
    x_stride,
    residual_stride,
    width,
    eps,
    IS_CENTRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program. A row that fits one block is read once; others once for each of mean, variance and result."""
    row = tl.program_id(0).to(tl.int64)
    x_D, residual_D = x_RD + row * x_stride, residual_RD + row * residual_stride
    normed_D, summed_D = normed_RD + row * width, summed_RD + row * width
    mean = 0.0
    if IS_WHOLE:
        at = tl.arange(0, BLOCK)
        mask = at < width
        s = _summed(x_D, residual_D, at, mask, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(summed_D + at, s.to(summed_RD.dtype.element_ty), mask=mask)
        if IS_CENTRED:
            mean = tl.sum(s, axis=0) / width
            s = tl.where(mask, s - mean, 0.0)
        factor = 1.0 / tl.sqrt(tl.sum(s * s, axis=0) / width + eps)
        u = _affine(s * factor, weight_D, bias_D, at, mask, HAS_WEIGHT, HAS_BIAS)
        tl.store(normed_D + at, u.to(normed_RD.dtype.element_ty), mask=mask)
    else:
        if IS_CENTRED:
            sums = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, width, BLOCK):
                at = start + tl.arange(0, BLOCK)
                sums += _summed(x_D, residual_D, at, at < width, HAS_RESIDUAL)
            mean = tl.sum(sums, axis=0) / width
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            s = tl.where(at < width, _summed(x_D, residual_D, at, at < width, HAS_RESIDUAL) - mean, 0.0)
            squares += s * s
        factor = 1.0 / tl.sqrt(tl.sum(squares, axis=0) / width + eps)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < width
            s = _summed(x_D, residual_D, at, mask, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(summed_D + at, s.to(summed_RD.dtype.element_ty), mask=mask)
            u = _affine((s - mean) * factor, weight_D, bias_D, at, mask, HAS_WEIGHT, HAS_BIAS)
            tl.store(normed_D + at, u.to(normed_RD.dtype.element_ty), mask=mask)
    if IS_CENTRED:
        tl.store(means_R + row, mean)
    tl.store(factors_R + row, factor)


@triton.jit
def _loaded(grad_D, summed_D, weight_D, mean, factor, at, mask, HAS_WEIGHT: tl.constexpr):
    """The gradient, the unit row u, and the gradient times the weight."""
    grad = tl.load(grad_D + at, mask=mask, other=0.0).to(tl.float32)
    u = (tl.load(summed_D + at, mask=mask, other=0.0).to(tl.float32) - mean) * factor
    return grad, tl.where(mask, u, 0.0), _affine(grad, weight_D, weight_D, at, mask, HAS_WEIGHT, False)


@triton.jit
def _store(grad_in, grad_in_D, passed_D, at, mask, HAS_PASSED: tl.constexpr):
    if HAS_PASSED:
        grad_in += tl.load(passed_D + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_in_D + at, grad_in.to(grad_in_D.dtype.element_ty), mask=mask)


@triton.jit
def backward_whole(
    grad_RD,
    passed_RD,
    summed_RD,
    weight_D,
    means_R,
    factors_R,
    grad_in_RD,
    weight_parts_PD,
    bias_parts_PD,
    grad_stride,
    passed_stride,
    summed_stride,
    num_rows,
    width,
    IS_CENTRED: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Programs take rows in turn; each keeps sums of its own for the weight and the bias, and leaves them as one row of parts."""
    part = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < width
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(part, num_rows, tl.num_programs(0)):
        mean = 0.0
        if IS_CENTRED:
            mean = tl.load(means_R + row)
        factor = tl.load(factors_R + row)
        grad, u, g = _loaded(
            grad_RD + row * grad_stride, summed_RD + row * summed_stride, weight_D, mean, factor, at, mask, HAS_WEIGHT
        )
        grad_in = g - u * (tl.sum(g * u, axis=0) / width)
        if IS_CENTRED:
            grad_in -= tl.sum(g, axis=0) / width
        _store(grad_in * factor, grad_in_RD + row * width, passed_RD + row * passed_stride, at, mask, HAS_PASSED)
        if HAS_WEIGHT:
            weight_sum += grad * u
        if HAS_BIAS:
            bias_sum += grad
    if HAS_WEIGHT:
        tl.store(weight_parts_PD + part * width + at, weight_sum, mask=mask)
    if HAS_BIAS:
        tl.store(bias_parts_PD + part * width + at, bias_sum, mask=mask)


@triton.jit
def backward_wide(
    grad_RD,
    passed_RD,
    summed_RD,
    weight_D,
    means_R,
    factors_R,
    grad_in_RD,
    grad_stride,
    passed_stride,
    summed_stride,
    width,
    IS_CENTRED: tl.constexpr,
    HAS_PASSED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row a program, read once for its sums and once for the result."""
    row = tl.program_id(0).to(tl.int64)
    grad_D, summed_D = grad_RD + row * grad_stride, summed_RD + row * summed_stride
    mean = 0.0
    if IS_CENTRED:
        mean = tl.load(means_R + row)
    factor = tl.load(factors_R + row)
    products = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        _grad, u, g = _loaded(grad_D, summed_D, weight_D, mean, factor, at, at < width, HAS_WEIGHT)
        products += g * u
        if IS_CENTRED:
            sums += g
    along = tl.sum(products, axis=0) / width
    level = tl.sum(sums, axis=0) / width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < width
        _grad, u, g = _loaded(grad_D, summed_D, weight_D, mean, factor, at, mask, HAS_WEIGHT)
        grad_in = (g - u * along - level) * factor
        _store(grad_in, grad_in_RD + row * width, passed_RD + row * passed_stride, at, mask, HAS_PASSED)


@triton.jit
def column_sums(
    grad_RD,
    summed_RD,
    means_R,
    factors_R,
    weight_parts_PD,
    bias_parts_PD,
    grad_stride,
    summed_stride,
    num_rows,
    width,
    IS_CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weight's and bias's parts of wide rows: programs of a column block take rows in turn."""
    part = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(part, num_rows, tl.num_programs(1)):
        grad = tl.load(grad_RD + row * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            mean = 0.0
            if IS_CENTRED:
                mean = tl.load(means_R + row)
            s = tl.load(summed_RD + row * summed_stride + at, mask=mask, other=0.0).to(tl.float32)
            weight_sum += grad * (s - mean) * tl.load(factors_R + row)
        if HAS_BIAS:
            bias_sum += grad
    if HAS_WEIGHT:
        tl.store(weight_parts_PD + part * width + at, weight_sum, mask=mask)
    if HAS_BIAS:
        tl.store(bias_parts_PD + part * width + at, bias_sum, mask=mask)
