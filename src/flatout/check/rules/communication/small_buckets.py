"""Many small collectives where a few large ones would do.

Costs        What a call costs however little it carries, once for each call too many.
Evidence     Calls of one collective from one line, the time of those with at most 16 KiB, and the bytes of all together; for
             DistributedDataParallel the sizes of its buckets.
Levers       communication.bucket-gradients
False alarm  Large calls, whose time is the transfer and stays; buckets that overlap with the backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note

_BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's default bucket."""
_FEWEST_CALLS = 4
_SMALL_BUCKET_BYTES = 1 << 20
_FEWEST_BUCKETS = 8


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that makes many small calls."""
    for row in evidence.collectives:
        if row.num < _FEWEST_CALLS or not row.small_call_s or row.op == "barrier":
            continue
        needed = max(1, math.ceil(row.bytes / _BUCKET_BYTES))
        saved_s = min((row.num - needed) * row.small_call_s, row.transfer_s)
        if saved_s <= 0:
            continue
        yield Finding(
            where=evidence.source_of(row.source),
            cost_s=row.exposed_s,
            # A call's fixed cost shrinks where calls are queued back to back; what one call takes alone is its upper bound.
            saved_s=(0.5 * saved_s, saved_s),
            because=f"{row.num:.0f} {row.op} a step carry {row.bytes / max(1.0, row.num) / 1e3:.1f} kB each; a call takes "
            f"{row.small_call_s * 1e6:.0f} us however little it carries",
            edit="flatten the tensors into one (torch._utils._flatten_dense_tensors, or one buffer with views) and reduce that; "
            "for gradients use DistributedDataParallel",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for a DistributedDataParallel module with many small buckets."""
    small_s = min((c.small_call_s for c in evidence.collectives if c.small_call_s), default=0.0)
    price = f"; each costs about {small_s * 1e6:.0f} us of latency" if small_s else ""
    for module in evidence.distributed.replications if evidence.distributed is not None else ():
        sizes = module.bucket_bytes
        if len(sizes) >= _FEWEST_BUCKETS and fmean(sizes) < _SMALL_BUCKET_BYTES:
            yield Note(
                where=evidence.source_of(module.source),
                text=f"{len(sizes)} gradient buckets of {fmean(sizes) / 1e6:.2f} MB on average{price}: bucket_cap_mb is "
                f"{module.bucket_cap_bytes / (1 << 20):.1f}, try the default of 25",
            )


RULE = rule(__name__, check, note=note)
