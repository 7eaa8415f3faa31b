"""Triton: one token's attention to a cache, in parts of the places that many programs take, joined by the last of them.

B batch, N heads of queries, G heads of keys, S places, H head dim; R heads that share keys, P parts, BS places at a time
This folder has no __init__.py, so that the registry's search passes it by: it is imported when it is run, and only where there is
Triton.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(q, keys, values, position, out, parts, counters, scale, S: tl.constexpr, H: tl.constexpr, R: tl.constexpr,
           P: tl.constexpr, BS: tl.constexpr):  # fmt: skip
    """A part of a head of keys a program, for one of the heads that share it. A part of no places counts nothing: its largest
    score is the lowest number there is and its sum 0."""
    head, part = tl.program_id(0), tl.program_id(1)
    h, s = tl.arange(0, H), tl.arange(0, BS)
    num = tl.load(position).to(tl.int32) + 1
    stretch = tl.cdiv(tl.cdiv(num, P), BS) * BS
    first, end = part * stretch, tl.minimum((part + 1) * stretch, num)
    row = (head // R).to(tl.int64) * S * H
    # In base 2: exp2 is what the device has.
    query = tl.load(q + head * H + h).to(tl.float32) * (scale * 1.4426950408889634)
    top = tl.full((1,), -1e38, tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((H,), tl.float32)
    for start in range(first, end, BS):
        at = start + s
        inside = at < end
        k = tl.load(keys + row + at[:, None] * H + h[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + row + at[:, None] * H + h[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        score = tl.where(inside, tl.sum(k * query[None, :], axis=1), -1e38)
        above = tl.maximum(top, tl.max(score, axis=0))
        weight = tl.where(inside, tl.exp2(score - above), 0.0)
        shrink = tl.exp2(top - above)
        total = total * shrink + tl.sum(weight, axis=0)
        acc = acc * shrink + tl.sum(weight[:, None] * v, axis=0)
        top = above
    mine = parts + (head * P + part) * (H + 2)
    one = tl.arange(0, 1)
    tl.store(mine + h, acc)
    tl.store(mine + H + one, top)
    tl.store(mine + H + 1 + one, total)
    tl.debug_barrier()
    last = tl.atomic_add(counters + head, 1, sem="acq_rel", scope="gpu") == P - 1
    tl.debug_barrier()
    if last:
        p = tl.arange(0, P)
        all_parts = parts + (head * P + p) * (H + 2)
        tops = tl.load(all_parts + H, cache_modifier=".cg")
        totals = tl.load(all_parts + H + 1, cache_modifier=".cg")
        accs = tl.load(all_parts[:, None] + h[None, :], cache_modifier=".cg")
        shrinks = tl.exp2(tops - tl.max(tops, axis=0))
        joined = tl.sum(accs * shrinks[:, None], axis=0) / tl.sum(totals * shrinks, axis=0)
        tl.store(out + head * H + h, joined.to(out.dtype.element_ty))
        tl.store(counters + head, 0)
