"""The product in Triton: c = cast(scale * (activation(a @ b + bias) + residual)), summed in float32; its activations; and
copies with aligned rows, as torch's own between unaligned rows moves one number at a time.

M rows of a and c, N columns of b and c, K depth; BM, BN, BK tile sizes; S splits of the depth; L numbers from row to row
Importing this needs Triton. Sizes and strides are constants of the compiled kernel, from which the compiler knows how wide it may
load and store; M alone is not, as the number of tokens changes.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def identity(x):
    return x


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)  # tl.maximum would turn NaN into 0


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    # (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {None: identity, "relu": relu, "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}


@triton.jit
def finish_tile(acc, c, bias, residual, scale, row, col, M, N: tl.constexpr, L_c: tl.constexpr, L_r: tl.constexpr,
           ACTIVATION: tl.constexpr, ROW_SCALE: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr):  # fmt: skip
    """The epilogue of the tile at (row, col), and its store."""
    m, n = tl.arange(0, BM), tl.arange(0, BN)
    in_m, in_n = row + m < M, col + n < N
    inside = in_m[:, None] & in_n[None, :]
    if bias is not None:
        acc += tl.load(bias + col + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    acc = ACTIVATION(acc)
    if residual is not None:
        corner = residual + tl.cast(row, tl.int64) * L_r + col
        acc += tl.load(corner + m[:, None] * L_r + n[None, :], mask=inside, other=0.0).to(tl.float32)
    if scale is not None:
        if ROW_SCALE:
            acc *= tl.load(scale + row + m, mask=in_m, other=1.0)[:, None]
        else:
            acc *= tl.load(scale)
    if LARGEST is not None:  # saturates, and keeps NaN, which min and max would lose
        acc = tl.where(acc > LARGEST, LARGEST, tl.where(acc < -LARGEST, -LARGEST, acc))
    if c.dtype.element_ty == tl.int8:
        # 1.5 * 2**23 leaves nothing behind the point; halves go to the even number
        acc = (acc + 12582912.0) - 12582912.0
    corner = c + tl.cast(row, tl.int64) * L_c + col
    tl.store(corner + m[:, None] * L_c + n[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def tile(x, row, col, rows, cols, L: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, IS_DESCRIPTOR: tl.constexpr):
    """ROWS x COLS numbers of x from (row, col); zeros outside."""
    if IS_DESCRIPTOR:
        numbers = x.load([row, col])
    else:
        r, s = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
        corner = x + tl.cast(row, tl.int64) * L + col
        numbers = tl.load(corner + r * L + s, mask=(row + r < rows) & (col + s < cols), other=0.0)
    return numbers


@triton.jit
def corner_of(place, tiles_m, tiles_n, GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Row and column of a tile. Tiles are taken in groups of GROUP rows of them: programs of one time share what they read."""
    first = place // (GROUP * tiles_n) * GROUP
    group = min(tiles_m - first, GROUP)
    return (first + place % (GROUP * tiles_n) % group) * BM, place % (GROUP * tiles_n) // group * BN


@triton.jit
def add_up(parts, c, bias, residual, scale, place, index, row, col, M, N: tl.constexpr, L_c: tl.constexpr,
           L_r: tl.constexpr, ACTIVATION: tl.constexpr, ROW_SCALE: tl.constexpr, LARGEST: tl.constexpr,
           BM: tl.constexpr, BN: tl.constexpr, S: tl.constexpr):  # fmt: skip
    """Adds one of S slices of a tile over its S parts, in a fixed order, and finishes it."""
    SLICE: tl.constexpr = BM * BN // S
    ROWS: tl.constexpr = max(1, SLICE // BN)
    s, e = tl.arange(0, S)[:, None] * (BM * BN), tl.arange(0, SLICE)[None, :]
    part = tl.load(parts + tl.cast(place, tl.int64) * (S * BM * BN) + index * SLICE + s + e, cache_modifier=".cg")
    acc = tl.reshape(tl.sum(part, axis=0), (ROWS, SLICE // ROWS))
    finish_tile(acc, c, bias, residual, scale, row + index * SLICE // BN, col + index * SLICE % BN, M, N, L_c, L_r, ACTIVATION,
           ROW_SCALE, LARGEST, ROWS, SLICE // ROWS)  # fmt: skip


@triton.jit
def begin(EARLY: tl.constexpr):
    """A launch that may begin before the one before it on its stream has ended waits for it here, and lets the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def wait_for_all(counter, S: tl.constexpr):
    """Returns when S programs have come here; all of them must run at once. The counter, 0 at first, is good for any number of
    times, past its own range as well: S is a power of two."""
    tl.debug_barrier()
    count = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    enough = (count & -S) + S
    while count - enough < 0:
        count = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@triton.jit
def product(a, b, c, bias, residual, scale, parts, counters, M, N: tl.constexpr, K: tl.constexpr, L_a: tl.constexpr,
            L_b: tl.constexpr, L_c: tl.constexpr, L_r: tl.constexpr, A_COLUMNS: tl.constexpr, B_COLUMNS: tl.constexpr,
            IS_DESCRIPTOR: tl.constexpr, ACTIVATION: tl.constexpr, ROW_SCALE: tl.constexpr, LARGEST: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S: tl.constexpr, GROUP: tl.constexpr,
            FLATTEN: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """One program after the other takes the next tile, or with S > 1 the next part of one, a stretch of the depth.

    a is stored as (M, K), or with A_COLUMNS as (K, M); b as (K, N), or with B_COLUMNS as (N, K). Parts are float32, and added
    up here when the parts of a tile have met at its counter; without counters by `add_parts_of_all`, afterwards.
    """
    begin(EARLY)
    tiles_m, tiles_n, blocks = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(tl.cdiv(K, BK), S)
    for t in tl.range(tl.program_id(0), tiles_m * tiles_n * S, tl.num_programs(0), flatten=FLATTEN):
        split, place = t // (tiles_m * tiles_n), t % (tiles_m * tiles_n)
        row, col = corner_of(place, tiles_m, tiles_n, GROUP, BM, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for block in range(blocks):
            k = (split * blocks + block) * BK
            if A_COLUMNS:
                x = tile(a, k, row, K, M, L_a, BK, BM, IS_DESCRIPTOR).T
            else:
                x = tile(a, row, k, M, K, L_a, BM, BK, IS_DESCRIPTOR)
            if B_COLUMNS:
                y = tile(b, col, k, N, K, L_b, BN, BK, IS_DESCRIPTOR).T
            else:
                y = tile(b, k, col, K, N, L_b, BK, BN, IS_DESCRIPTOR)
            acc = tl.dot(x, y, acc, input_precision="ieee")
        if S == 1:
            finish_tile(acc, c, bias, residual, scale, row, col, M, N, L_c, L_r, ACTIVATION, ROW_SCALE, LARGEST, BM, BN)
        else:
            part = parts + (tl.cast(place, tl.int64) * S + split) * (BM * BN)
            tl.store(part + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :], acc)
            if counters is not None:
                wait_for_all(counters + place, S)
                add_up(parts, c, bias, residual, scale, place, split, row, col, M, N, L_c, L_r, ACTIVATION, ROW_SCALE,
                       LARGEST, BM, BN, S)  # fmt: skip


@triton.jit
def add_parts_of_all(c, bias, residual, scale, parts, M, N: tl.constexpr, L_c: tl.constexpr, L_r: tl.constexpr,
           ACTIVATION: tl.constexpr, ROW_SCALE: tl.constexpr, LARGEST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
           S: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Adds up the parts of all tiles, a slice a program."""
    begin(EARLY)
    place, index = tl.program_id(0) // S, tl.program_id(0) % S
    row, col = corner_of(place, tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP, BM, BN)
    add_up(parts, c, bias, residual, scale, place, index, row, col, M, N, L_c, L_r, ACTIVATION, ROW_SCALE, LARGEST, BM, BN,
           S)  # fmt: skip


@triton.jit
def repack(x, out, rows, cols: tl.constexpr, L_x: tl.constexpr, all_rows, L_out: tl.constexpr, BC: tl.constexpr):
    """Copy x (rows, cols), with L_x from row to row, to out (all_rows, L_out), filled up with zeros."""
    row, n = tl.program_id(0), tl.program_id(1) * BC + tl.arange(0, BC)
    corner = tl.cast(row, tl.int64)
    v = tl.load(x + corner * L_x + n, mask=(n < cols) & (row < rows), other=0.0)
    tl.store(out + corner * L_out + n, v, mask=(n < L_out) & (row < all_rows))
