"""Triton: SwiGLU and its gradients, rounded to float8 with one scale a matrix, as they lie and with rows and columns exchanged.

Two passes: the first finds the largest magnitudes, the second computes the same numbers again and rounds them. Magnitudes are
compared by their bits, which order numbers of one sign, and NaN above all. Rows and columns are exchanged in words of four rows:
by bytes, Triton moves each through shared memory by itself. Where one kernel stores the same float8 numbers as they lie and
exchanged, code of the ptxas that Triton has for Hopper (12.8, 12.9) stores foreign bytes (issue 11111 of triton-lang/triton, and
bench/results/2026-12-01-h200/float8_gating_mixed_up.json). So an instruction of its own rounds those that are exchanged.

N rows, H width. This folder has no __init__.py, so that the registry's search passes it by.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _magnitude_bits(numbers):
    return tl.abs(numbers).to(tl.int32, bitcast=True)


@triton.jit
def _step(largest, most):
    """What 1 stands for in a format whose largest number is `most`: at least the smallest normal float32; NaN of NaN."""
    step = tl.load(largest).to(tl.float32, bitcast=True) / most
    return tl.where(step < 1.1754943508222875e-38, 1.1754943508222875e-38, step)


@triton.jit
def _gradients(grad, gate, up):
    """Of gate and up, and SwiGLU itself."""
    sigmoid = tl.sigmoid(gate)
    active = gate * sigmoid
    return grad * up * (sigmoid + active * (1.0 - sigmoid)), grad * active, active * up


@triton.jit
def largest_gated(gate_NH, up_NH, largest, total, STRETCH: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest magnitude of SwiGLU, over what is in `largest`; a program takes STRETCH blocks."""
    first = tl.program_id(0).to(tl.int64) * STRETCH * BLOCK
    most = tl.zeros([BLOCK], tl.int32)
    for block in range(STRETCH):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(gate_NH + at, mask=at < total, other=0.0).to(tl.float32)
        up = tl.load(up_NH + at, mask=at < total, other=0.0).to(tl.float32)
        most = tl.maximum(most, _magnitude_bits(gate * tl.sigmoid(gate) * up))
    tl.atomic_max(largest, tl.max(most, axis=0))


@triton.jit
def rounded_gated(gate_NH, up_NH, largest, gated_NH, scale, total, most, BLOCK: tl.constexpr):
    """SwiGLU over its step, in the format of `gated_NH`; the step is written to `scale`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    step = _step(largest, most)
    if tl.program_id(0) == 0:
        tl.store(scale, step)
    gate = tl.load(gate_NH + at, mask=at < total, other=0.0).to(tl.float32)
    up = tl.load(up_NH + at, mask=at < total, other=0.0).to(tl.float32)
    small = (gate * tl.sigmoid(gate) * up * (1.0 / step)).to(gated_NH.dtype.element_ty)
    tl.store(gated_NH + at, small, mask=at < total)


@triton.jit
def largest_gradients(grad_NH, gate_NH, up_NH, largest, total, STRETCH: tl.constexpr, BLOCK: tl.constexpr):
    """The bits of the largest magnitudes of the gradients of gate and up, over what is in `largest`."""
    first = tl.program_id(0).to(tl.int64) * STRETCH * BLOCK
    most_gate = tl.zeros([BLOCK], tl.int32)
    most_up = tl.zeros([BLOCK], tl.int32)
    for block in range(STRETCH):
        at = first + block * BLOCK + tl.arange(0, BLOCK)
        grad = tl.load(grad_NH + at, mask=at < total, other=0.0).to(tl.float32)
        gate = tl.load(gate_NH + at, mask=at < total, other=0.0).to(tl.float32)
        up = tl.load(up_NH + at, mask=at < total, other=0.0).to(tl.float32)
        to_gate, to_up, _ = _gradients(grad, gate, up)
        most_gate = tl.maximum(most_gate, _magnitude_bits(to_gate))
        most_up = tl.maximum(most_up, _magnitude_bits(to_up))
    tl.atomic_max(largest, tl.max(most_gate, axis=0))
    tl.atomic_max(largest + 1, tl.max(most_up, axis=0))


@triton.jit
def _packed(number, small, byte: tl.constexpr, INTERPRETED: tl.constexpr):
    """A number in e5m2, which `small` is, at a byte's place in a word."""
    if INTERPRETED:
        word = small.to(tl.uint8, bitcast=True).to(tl.int32)
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 pair; cvt.rn.satfinite.e5m2x2.f32 pair, 0f00000000, $1; cvt.u32.u16 $0, pair; }",
            "=r,f",
            [number],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return word << (8 * byte)


@triton.jit
def rounded_gradients(
    grad_NH,
    gate_NH,
    up_NH,
    largest,
    gated_scale,
    to_gate_NH,
    to_gate_HN,
    to_up_NH,
    to_up_HN,
    gated_HN,
    gate_scale,
    up_scale,
    num_rows,
    width,
    most,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Both gradients twice, SwiGLU in e4m3 exchanged, and the steps of the gradients, which are written to the scales.

    What is exchanged has four rows in a word of 32 bits; `num_rows` is a multiple of 4.
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    w, k = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    gate_step, up_step = _step(largest, most), _step(largest + 1, most)
    if row + column == 0:
        tl.store(gate_scale, gate_step)
        tl.store(up_scale, up_step)
    by_gate, by_up, by_gated = 1.0 / gate_step, 1.0 / up_step, 1.0 / tl.load(gated_scale)
    mask = (row + 4 * w < num_rows)[:, None] & (column + k < width)[None, :]
    words_gate = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
    words_up = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
    words_gated = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
    for byte in tl.static_range(4):
        at = (row + byte) * width + column + (4 * w[:, None] * width + k[None, :])
        if MASKED:
            grad = tl.load(grad_NH + at, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(gate_NH + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(up_NH + at, mask=mask, other=0.0).to(tl.float32)
        else:
            grad = tl.load(grad_NH + at).to(tl.float32)
            gate = tl.load(gate_NH + at).to(tl.float32)
            up = tl.load(up_NH + at).to(tl.float32)
        to_gate, to_up, gated = _gradients(grad, gate, up)
        to_gate, to_up = to_gate * by_gate, to_up * by_up
        small_gate, small_up = to_gate.to(tl.float8e5), to_up.to(tl.float8e5)
        if MASKED:
            tl.store(to_gate_NH + at, small_gate, mask=mask)
            tl.store(to_up_NH + at, small_up, mask=mask)
        else:
            tl.store(to_gate_NH + at, small_gate)
            tl.store(to_up_NH + at, small_up)
        words_gate |= _packed(to_gate, small_gate, byte, INTERPRETED)
        words_up |= _packed(to_up, small_up, byte, INTERPRETED)
        words_gated |= (gated * by_gated).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32) << (8 * byte)
    beside = (column + k)[None, :] * (num_rows // 4) + (row // 4 + w)[:, None]
    if MASKED:
        tl.store(to_gate_HN + beside, words_gate, mask=mask)
        tl.store(to_up_HN + beside, words_up, mask=mask)
        tl.store(gated_HN + beside, words_gated, mask=mask)
    else:
        tl.store(to_gate_HN + beside, words_gate)
        tl.store(to_up_HN + beside, words_up)
        tl.store(gated_HN + beside, words_gated)


@triton.jit
def rounded_twice(
    grad_NI,
    scale,
    small_NI,
    small_IN,
    num_rows,
    width,
    MASKED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """A matrix over its scale in e5m2, as it lies and exchanged; `num_rows` is a multiple of 4."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    w, k = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    by = 1.0 / tl.load(scale)
    mask = (row + 4 * w < num_rows)[:, None] & (column + k < width)[None, :]
    words = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
    for byte in tl.static_range(4):
        at = (row + byte) * width + column + (4 * w[:, None] * width + k[None, :])
        if MASKED:
            number = tl.load(grad_NI + at, mask=mask, other=0.0).to(tl.float32) * by
        else:
            number = tl.load(grad_NI + at).to(tl.float32) * by
        small = number.to(tl.float8e5)
        if MASKED:
            tl.store(small_NI + at, small, mask=mask)
        else:
            tl.store(small_NI + at, small)
        words |= _packed(number, small, byte, INTERPRETED)
    beside = (column + k)[None, :] * (num_rows // 4) + (row // 4 + w)[:, None]
    if MASKED:
        tl.store(small_IN + beside, words, mask=mask)
    else:
        tl.store(small_IN + beside, words)
