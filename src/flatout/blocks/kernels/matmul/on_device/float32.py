"""A float32 product from three float16 or six bfloat16 ones, in Triton: each number is split into two of 11 bits, or three of 8.

M rows of a and c, N columns of b and c, K depth; S lines that share one scale (rows of a, columns of b), D numbers of a line
Importing this needs Triton. Matrix units add float16 products in float32 but cut what does not fit off, always towards zero,
so that long sums come out too small (Ootomo and Yokota, IJHPCA 36(4), 2022). Sums of BK products are therefore added by
ordinary float32 arithmetic, which rounds to the nearest.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flatout.blocks.kernels.matmul.on_device.product import corner_of, finish_tile, tile


@triton.jit
def split_into_halves(x, high, low, powers, counts, S, D: tl.constexpr, X_S: tl.constexpr, X_D: tl.constexpr, H_S: tl.constexpr,
          H_D: tl.constexpr, BS: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """Split x into high + low / 2**11 = x * 2**power, with a power for each line that brings its largest number to 2**14..2**15.

    Numbers from 2**-27 of their line's largest on keep 22 bits and a sign; smaller ones lose bits, and numbers below 2**-14
    weigh little. The most of either in any line, but for lines of zeros, go to `counts`. X_S and X_D (H_S and H_D) are
    strides of x (of high and low).
    """
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    d = tl.arange(0, BD)
    from_x = x + s.to(tl.int64)[:, None] * X_S
    to_s = s.to(tl.int64)[:, None] * H_S
    largest = tl.zeros((BS,), tl.int32)
    for start in range(0, D, BD):
        at = start + d.to(tl.int64)
        v = tl.load(from_x + at[None, :] * X_D, mask=(s < S)[:, None] & (at < D)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1))
    power = tl.minimum(268 - (largest >> 23), 254)  # biased; 268 = 127 + 14 + 127
    factor = (power << 23).to(tl.float32, bitcast=True)[:, None]
    tl.store(powers + s, power - 127, mask=s < S)
    small, light = tl.zeros((BS,), tl.int32), tl.zeros((BS,), tl.int32)
    for start in range(0, D, BD):
        at = start + d.to(tl.int64)
        inside = (s < S)[:, None] & (at < D)[None, :]
        v = tl.load(from_x + at[None, :] * X_D, mask=inside, other=0.0)
        w = v * factor
        h = w.to(tl.float16)
        tl.store(high + to_s + at[None, :] * H_D, h, mask=inside)
        tl.store(low + to_s + at[None, :] * H_D, ((w - h.to(tl.float32)) * 2048.0).to(tl.float16), mask=inside)
        small += tl.sum((inside & (v != 0.0) & (tl.abs(w) < 0.0001220703125)).to(tl.int32), axis=1)  # 2**-13
        light += tl.sum((inside & (tl.abs(w) < 1.0)).to(tl.int32), axis=1)
    # lines of zeros are exact; what meets infinity or NaN is neither anyway
    counts_it = (largest > 0) & (largest < 0x7F800000)
    tl.atomic_max(counts, tl.max(tl.where(counts_it, small, 0), axis=0))
    tl.atomic_max(counts + 1, tl.max(tl.where(counts_it, light, 0), axis=0))


@triton.jit
def powered(acc, a_powers, b_powers, row, col, M, N, BM: tl.constexpr, BN: tl.constexpr):
    """Undo the scales of rows and columns, in two steps, so that neither leaves float32 where the result does not."""
    m, n = row + tl.arange(0, BM), col + tl.arange(0, BN)
    by = -tl.load(a_powers + m, mask=m < M, other=0)[:, None] - tl.load(b_powers + n, mask=n < N, other=0)[None, :]
    first = by >> 1
    acc *= ((first + 127) << 23).to(tl.float32, bitcast=True)
    return acc * ((by - first + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def float16_products(a_high, a_low, b_high, b_low, a_powers, b_powers, a_counts, b_counts, unsure, one, c, bias, residual,
            scale, M, N: tl.constexpr, K: tl.constexpr, L_c: tl.constexpr, L_r: tl.constexpr, A_COLUMNS: tl.constexpr,
            B_COLUMNS: tl.constexpr, ACTIVATION: tl.constexpr, ROW_SCALE: tl.constexpr, BM: tl.constexpr,
            BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """The product of operands in two float16 parts each; `one` is 1.0, which the compiler does not know.

    `unsure` becomes 1, and nothing is done, where three products may not be as good as float32. A small number's error is
    below 2**-36, and meets at most 2**15 in the other operand. At K - light places or more of the depth both numbers are 1 or
    above, so that |a| @ |b| >= K - light; 2**-24 of that, float32's own rounding, may be lost: 2**-21 * small <= 2**-24 * (K
    - light). And a sum must have many numbers: single products err by up to 2**-22 here, 2**-24 in float32, whose sums of
    many err more.
    """
    small, light = tl.load(a_counts) + tl.load(b_counts), tl.load(a_counts + 1) + tl.load(b_counts + 1)
    is_sure = ((8 * small <= K - light) & (K - light >= 32)).to(tl.int32)
    if tl.program_id(0) == 0:
        tl.store(unsure, 1 - is_sure)
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for t in range(tl.program_id(0), tiles_m * tiles_n * is_sure, tl.num_programs(0)):
        row, col = corner_of(t, tiles_m, tiles_n, GROUP, BM, BN)
        acc, rest = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            if A_COLUMNS:
                x_high, x_low = a_high.load([k, row]).T, a_low.load([k, row]).T
            else:
                x_high, x_low = a_high.load([row, k]), a_low.load([row, k])
            if B_COLUMNS:
                y_high, y_low = b_high.load([col, k]).T, b_low.load([col, k]).T
            else:
                y_high, y_low = b_high.load([k, col]), b_low.load([k, col])
            rest = tl.dot(x_low, y_high, rest)
            rest = tl.dot(x_high, y_low, rest)
            acc += tl.dot(x_high, y_high) * one  # without `one` the compiler would add within the matrix units
        acc = powered(acc + rest * 0.00048828125, a_powers, b_powers, row, col, M, N, BM, BN)  # 2**-11
        finish_tile(acc, c, bias, residual, scale, row, col, M, N, L_c, L_r, ACTIVATION, ROW_SCALE, None, BM, BN)


@triton.jit
def parted(x, PART: tl.constexpr):
    """Three numbers of 8 bits whose sum is x. The first is rounded, halves to the even one, but for the largest, which would
    become infinite. By hand, since the interpreter knows no bfloat16."""
    bits = x.to(tl.uint32, bitcast=True)
    up = tl.where((bits & 0x7FFFFFFF) < 0x7F7F8000, 0x7FFF + ((bits >> 16) & 1), 0).to(tl.uint32)
    high = ((bits + up) & 0xFFFF0000).to(tl.float32, bitcast=True)
    middle = (x - high).to(PART)
    return high.to(PART), middle, (x - high - middle.to(tl.float32)).to(PART)


@triton.jit
def bfloat16_products(a, b, unsure, one, c, bias, residual, scale, M, N: tl.constexpr, K: tl.constexpr, L_a: tl.constexpr,
                 L_b: tl.constexpr, L_c: tl.constexpr, L_r: tl.constexpr, A_COLUMNS: tl.constexpr,
                 B_COLUMNS: tl.constexpr, IS_DESCRIPTOR: tl.constexpr, ACTIVATION: tl.constexpr,
                 ROW_SCALE: tl.constexpr, PART: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                 GROUP: tl.constexpr):  # fmt: skip
    """Six products of parts in bfloat16 (PART), which have float32's range; nothing where `unsure` points to 0."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    num_tiles = tiles_m * tiles_n
    if unsure is not None:
        num_tiles *= tl.load(unsure)
    for t in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row, col = corner_of(t, tiles_m, tiles_n, GROUP, BM, BN)
        acc, rest = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            if A_COLUMNS:
                x = tile(a, k, row, K, M, L_a, BK, BM, IS_DESCRIPTOR).T
            else:
                x = tile(a, row, k, M, K, L_a, BM, BK, IS_DESCRIPTOR)
            if B_COLUMNS:
                y = tile(b, col, k, N, K, L_b, BN, BK, IS_DESCRIPTOR).T
            else:
                y = tile(b, k, col, K, N, L_b, BK, BN, IS_DESCRIPTOR)
            x_high, x_middle, x_low = parted(x, PART)
            y_high, y_middle, y_low = parted(y, PART)
            rest = tl.dot(x_low, y_high, rest)
            rest = tl.dot(x_middle, y_middle, rest)
            rest = tl.dot(x_high, y_low, rest)
            rest = tl.dot(x_middle, y_high, rest)
            rest = tl.dot(x_high, y_middle, rest)
            acc += tl.dot(x_high, y_high) * one
        finish_tile(acc + rest, c, bias, residual, scale, row, col, M, N, L_c, L_r, ACTIVATION, ROW_SCALE, None, BM, BN)
