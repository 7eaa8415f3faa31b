"""Triton: the losses of a chunk and the gradient of its logits, written over them; rows in turn by each program.

C tokens of a chunk, V vocabulary. This folder has no __init__.py, so that the registry's search passes it by: it is imported
when it is run, and only where there is Triton.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _capped(z, cap, HAS_CAP: tl.constexpr):
    if HAS_CAP:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)  # tanh, which Triton has only as a library's function
    return z


@triton.jit
def row_losses(
    logits_CV,
    targets_C,
    scales_C,
    losses_C,
    norms_C,
    num_rows,
    row_stride,
    vocabulary,
    ignore_index,
    label_smoothing,
    z_loss,
    cap,
    HAS_CAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_GRADIENT: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST_READ: tl.constexpr,
    LAST_READ: tl.constexpr,
):
    """Each logit is read once for the loss and once more for the gradient.

    Rows are read and written up to `row_stride`, what lies between them included: the mask is then a multiple of 16 numbers, and
    memory is read in whole vectors whatever V is. What is read there counts for nothing; zeros are written.
    Each GROUP of neighbours has a maximum and a sum of its own, so that an exponential is computed for each logit and one more
    for a group; they are brought together once, at the end of the row. A target outside of 0..V-1 makes the loss NaN; nothing is
    read or written outside of the row. With HAS_NORMS the logsumexp goes to `norms_C`. Program p of P takes rows p, p + P, and so
    on. FIRST_READ and LAST_READ tell the cache what to do with what the two passes read ("evict_last", "evict_first", or "").
    """
    row = tl.program_id(0).to(tl.int64)
    while row < num_rows:
        logits_V = logits_CV + row * row_stride
        target = tl.load(targets_C + row)
        if target == ignore_index:
            tl.store(losses_C + row, 0.0)
            if HAS_GRADIENT:
                for start in range(0, vocabulary, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    zeros = tl.zeros((BLOCK,), dtype=logits_CV.dtype.element_ty)
                    tl.store(logits_V + at, zeros, mask=at < row_stride)
        else:
            # A finite floor: the difference of two infinities is none.
            tops = tl.full((BLOCK // GROUP,), -1e38, tl.float32)
            totals = tl.zeros((BLOCK // GROUP,), tl.float32)
            sums = tl.zeros((BLOCK // GROUP,), tl.float32)
            within = tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            for start in range(0, vocabulary, BLOCK):
                at = start + within
                raw = tl.load(logits_V + at, mask=at < row_stride, other=0.0, eviction_policy=FIRST_READ)
                raw = tl.where(at < vocabulary, raw, 0.0)
                z = tl.where(at < vocabulary, _capped(raw.to(tl.float32), cap, HAS_CAP), -float("inf"))
                new_tops = tl.maximum(tops, tl.max(z, axis=1))
                totals = totals * tl.exp(tops - new_tops) + tl.sum(tl.exp(z - new_tops[:, None]), axis=1)
                tops = new_tops
                if HAS_SMOOTHING:
                    sums += tl.sum(tl.where(at < vocabulary, z, 0.0), axis=1)
            top = tl.max(tops, axis=0)
            norm = top + tl.log(tl.sum(totals * tl.exp(tops - top), axis=0))
            is_class = (target >= 0) & (target < vocabulary)
            own = _capped(tl.load(logits_V + target, mask=is_class, other=float("nan")).to(tl.float32), cap, HAS_CAP)
            loss = norm - (1.0 - label_smoothing) * own + z_loss * norm * norm
            if HAS_SMOOTHING:
                loss -= label_smoothing * tl.sum(sums, axis=0) / vocabulary
            tl.store(losses_C + row, loss)
            if HAS_NORMS:
                tl.store(norms_C + row, norm)
            if HAS_GRADIENT:
                scale = tl.load(scales_C + row)
                scale_of_share = scale * (1.0 + 2.0 * z_loss * norm)
                everywhere = scale * label_smoothing / vocabulary
                at_target = scale * (1.0 - label_smoothing)
                for start in range(0, vocabulary, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    raw = tl.load(logits_V + at, mask=at < row_stride, other=0.0, eviction_policy=LAST_READ)
                    z = _capped(tl.where(at < vocabulary, raw, 0.0).to(tl.float32), cap, HAS_CAP)
                    gradient = scale_of_share * tl.exp(z - norm) - everywhere - tl.where(at == target, at_target, 0.0)
                    if HAS_CAP:
                        gradient *= 1.0 - (z / cap) * (z / cap)
                    gradient = tl.where(at < vocabulary, gradient, 0.0)
                    gradient = gradient.to(logits_CV.dtype.element_ty)
                    tl.store(logits_V + at, gradient, mask=at < row_stride, eviction_policy=LAST_READ)
        row += tl.num_programs(0)


@triton.jit
def scale(values, factor, num, BLOCK: tl.constexpr):
    """Values times a number that only the device knows; nothing is read when it is 1."""
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        old = tl.load(values + at, mask=at < num, other=0.0)
        tl.store(values + at, (old.to(tl.float32) * by).to(values.dtype.element_ty), mask=at < num)
