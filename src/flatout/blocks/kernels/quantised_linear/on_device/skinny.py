"""Triton: products of a few rows with a weight of 4, 8 or 16 bits that is read once, and that weight expanded.

M rows, N outputs, K inputs; BN outputs of a program, BK bytes or numbers of a row at a time, S parts of the depth
This folder has no __init__.py, so that the registry's search passes it by: it is imported when it is run, and only where there is
Triton. Sizes are constants of the compiled kernel, from which the compiler knows how wide it may load.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from flatout.blocks.kernels.matmul.on_device.product import begin


def _unpacking(kind: str, upper: str) -> tl.constexpr:
    """The instructions of `by_masks` for two numbers of a type at a time; `upper` is the upper byte of 128, or 1024, in hex."""
    return tl.constexpr(
        f"""
        {{
        .reg .b32 low, high, m;
        mov.b32 m, 0x{upper}08{upper}08;
        and.b32 low, $4, 0x0f0f0f0f;
        shr.u32 high, $4, 4;
        and.b32 high, high, 0x0f0f0f0f;
        prmt.b32 $0, low, 0x{upper * 4}, 0x4140;
        prmt.b32 $1, low, 0x{upper * 4}, 0x4342;
        prmt.b32 $2, high, 0x{upper * 4}, 0x4140;
        prmt.b32 $3, high, 0x{upper * 4}, 0x4342;
        sub.{kind} $0, $0, m;
        sub.{kind} $1, $1, m;
        sub.{kind} $2, $2, m;
        sub.{kind} $3, $3, m;
        }}
        """
    )


_BFLOAT16 = _unpacking("bf16x2", "43")
_FLOAT16 = _unpacking("f16x2", "64")


@triton.jit
def by_arithmetic(words, kind: tl.constexpr):
    """Numbers in the low and the high bits of bytes, from -8 to 7."""
    low = (words & 15).to(tl.int8) - 8
    high = (words >> 4).to(tl.int8) - 8
    return low.to(tl.float32).to(kind), high.to(tl.float32).to(kind)


@triton.jit
def by_masks(words, kind: tl.constexpr):
    """The same, four bytes at a time: a code under the upper byte of 128 (of 1024 in float16) is the number 128 + code (1024 +
    code) already; 136 (1032) is subtracted."""
    if kind == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _BFLOAT16, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = tl.inline_asm_elementwise(
            _FLOAT16, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def finish(
    acc, y, bias, parts, counters, n, m, M, N: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, S: tl.constexpr
):
    """Stores acc [BN, BM]; with parts, the last program of a tile adds them up, always in the same order."""
    inside = (n < N)[:, None] & (m < M)[None, :]
    last = True
    if S > 1:
        tile, split = tl.program_id(0), tl.program_id(1)
        at = tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(parts + (tile * S + split) * (BN * BM) + at, acc)
        tl.debug_barrier()
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == S - 1
        tl.debug_barrier()
        if last:
            acc = tl.zeros((BN, BM), tl.float32)
            for s in range(S):
                acc += tl.load(parts + (tile * S + s) * (BN * BM) + at, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    if last:
        if bias is not None:
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(y + m[None, :] * N + n[:, None], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def tiles(x, codes, scales, bias, y, parts, counters, M, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
          GROUP: tl.constexpr, UNPACK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
          S: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """The product on the matrix units: a group of the depth (with 16 and 8 bits GROUP numbers of it) at a time."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    kind: tl.constexpr = x.dtype.element_ty
    row = tl.minimum(n, N - 1).to(tl.int64)  # rows past the end are read from the last one, and not stored
    first, end = tl.program_id(1) * (K // GROUP) // S, (tl.program_id(1) + 1) * (K // GROUP) // S
    acc = tl.zeros((BN, BM), tl.float32)
    begin(EARLY)
    if BITS == 4:
        HALF: tl.constexpr = GROUP // 2
        j = tl.arange(0, HALF)
        for g in range(first, end):
            words = tl.load(codes + row[:, None] * (K // 2) + (g * HALF + j)[None, :])
            low, high = UNPACK(words, kind)
            here = x + m[None, :] * K + (g * GROUP + j)[:, None]
            x_low = tl.load(here, mask=(m < M)[None, :], other=0.0)
            x_high = tl.load(here + HALF, mask=(m < M)[None, :], other=0.0)
            part = tl.dot(high, x_high, tl.dot(low, x_low, input_precision="ieee"), input_precision="ieee")
            acc += part * tl.load(scales + row * (K // GROUP) + g).to(tl.float32)[:, None]
    else:
        j = tl.arange(0, GROUP)
        for g in range(first, end):
            w = tl.load(codes + row[:, None] * K + (g * GROUP + j)[None, :]).to(kind)
            xs = tl.load(x + m[None, :] * K + (g * GROUP + j)[:, None], mask=(m < M)[None, :], other=0.0)
            acc = tl.dot(w, xs, acc, input_precision="ieee")
        if BITS == 8:
            acc *= tl.load(scales + row)[:, None]
    finish(acc, y, bias, parts, counters, n, m, M, N, BN, BM, S)


@triton.jit
def four_bytes(words, x_low, x_high, KIND: tl.constexpr):
    """Sums of the eight products of each 32-bit word of codes with four numbers of x in 64 bits, twice.

    A byte b is low + 16 * high, and masked, h, 16 * high: low * u + high * v = b * u + h * (v / 16 - u), which saves a mask and
    a shift for each pair. Codes are kept plus 8, which is taken off once for all.
    """
    masked = words & -252645136  # 0xF0F0F0F0
    u = number_at(x_low, 0, KIND)
    v = number_at(x_high, 0, KIND)
    all_x = u + v
    sums = (words & 255).to(tl.float32) * u + (masked & 255).to(tl.float32) * (v * 0.0625 - u)
    for i in tl.static_range(1, 4):
        u = number_at(x_low, i, KIND)
        v = number_at(x_high, i, KIND)
        all_x += u + v
        sums += ((words >> 8 * i) & 255).to(tl.float32) * u
        sums += ((masked >> 8 * i) & 255).to(tl.float32) * (v * 0.0625 - u)
    return sums - 8.0 * all_x


@triton.jit
def number_at(four, i: tl.constexpr, KIND: tl.constexpr):
    """The i-th number of four in 64 bits."""
    return (four >> 16 * i).to(tl.int16).to(KIND, bitcast=True).to(tl.float32)


@triton.jit
def lanes(x, codes, scales, bias, y, parts, counters, M, N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
          GROUP: tl.constexpr, KIND: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, S: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    """One row, on the ordinary units: BK numbers (with 4 bits, BK groups) of each of BN weights' rows at a time.

    With 4 bits x comes as 64-bit words of four numbers of type KIND, codes as 32-bit words.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, N - 1).to(tl.int64)
    UNIT: tl.constexpr = BK * GROUP if BITS == 4 else BK
    first = tl.program_id(1) * tl.cdiv(K, UNIT) // S
    end = (tl.program_id(1) + 1) * tl.cdiv(K, UNIT) // S
    begin(EARLY)
    if BITS == 4:
        QUADS: tl.constexpr = GROUP // 8
        j, g = tl.arange(0, QUADS), tl.arange(0, BK)
        sums = tl.zeros((BN, BK, QUADS), tl.float32)
        for step in range(first, end):
            at = step * BK + g
            inside = at < K // GROUP
            # Two words a thread: as it is for x, whose words are twice as wide, so that both are laid out alike and never moved.
            quad = tl.max_contiguous((at[:, None] * QUADS + j[None, :])[None], [1, 1, 2])
            words = tl.load(codes + row[:, None, None] * (K // 8) + quad, mask=inside[None, :, None], other=0)
            here = x + (at[:, None] * (2 * QUADS) + j[None, :])[None]
            x_low = tl.load(here, mask=inside[None, :, None], other=0)
            x_high = tl.load(here + QUADS, mask=inside[None, :, None], other=0)
            scale = tl.load(scales + row[:, None] * (K // GROUP) + at[None, :], mask=inside[None, :], other=0.0)
            sums += four_bytes(words, x_low, x_high, KIND) * scale.to(tl.float32)[:, :, None]
        acc = tl.sum(tl.sum(sums, axis=2), axis=1)
    else:
        j = tl.arange(0, BK)
        sums = tl.zeros((BN, BK), tl.float32)
        for step in range(first, end):
            at = step * BK + j
            inside = at < K
            w = tl.load(codes + row[:, None] * K + at[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
            sums += w * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        acc = tl.sum(sums, axis=1)
        if BITS == 8:
            acc *= tl.load(scales + row)
    finish(acc[:, None], y, bias, parts, counters, n, tl.arange(0, 1), 1, N, BN, 1, S)


@triton.jit
def expand(codes, scales, w, num_rows, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Expanded weights, w = code * scale: a stretch of a row a program; with 4 bits of BLOCK bytes, else of BLOCK numbers."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kind: tl.constexpr = w.dtype.element_ty
    if BITS == 4:
        HALF: tl.constexpr = GROUP // 2
        inside = at < K // 2
        group, place = at // HALF, at % HALF
        words = tl.load(codes + row * (K // 2) + at, mask=inside, other=0)
        scale = tl.load(scales + row * (K // GROUP) + group, mask=inside, other=0.0).to(tl.float32)
        to = w + row * K + group * GROUP + place
        tl.store(to, (((words & 15).to(tl.float32) - 8.0) * scale).to(kind), mask=inside)
        tl.store(to + HALF, (((words >> 4).to(tl.float32) - 8.0) * scale).to(kind), mask=inside)
    elif BITS == 8:
        inside = at < K
        code = tl.load(codes + row * K + at, mask=inside, other=0).to(tl.float32)
        tl.store(w + row * K + at, (code * tl.load(scales + row)).to(kind), mask=inside)
    else:
        inside = at < K
        tl.store(w + row * K + at, tl.load(codes + row * K + at, mask=inside, other=0.0).to(kind), mask=inside)
