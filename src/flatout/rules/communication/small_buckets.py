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

from flatout.records.distributed import Distributed, Replication
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule

_BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's default bucket."""
_FEWEST_CALLS = 4
_SMALL_BUCKET_BYTES = 1 << 20
_FEWEST_BUCKETS = 8


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that makes many small calls."""
    for row in evidence.distributed.collectives if evidence.distributed is not None else ():
        if row.num < _FEWEST_CALLS or not row.small_call_s or row.op == "barrier":
            continue
        needed = max(1, math.ceil(row.bytes / _BUCKET_BYTES))
        saved_s = min((row.num - needed) * row.small_call_s, row.transfer_s)
        if saved_s <= 0:
            continue
        yield Finding(
            rule=RULE.id,
            regime="communication",
            where=evidence.source_of(row.source),
            cost_s=row.exposed_s,
            # A call's fixed cost shrinks where calls are queued back to back; what one call takes alone is its upper bound.
            saved_s=(0.5 * saved_s, saved_s),
            because=f"{row.num:.0f} {row.op} a step carry {row.bytes / max(1.0, row.num) / 1e3:.1f} kB each; a call takes "
            f"{row.small_call_s * 1e6:.0f} us however little it carries",
            edit="flatten the tensors into one (torch._utils._flatten_dense_tensors, or one buffer with views) and reduce that; "
            "for gradients use DistributedDataParallel",
            levers=RULE.levers,
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for a DistributedDataParallel module with many small buckets."""
    distributed = evidence.distributed
    for module in distributed.replications if distributed is not None else ():
        if len(module.bucket_bytes) >= _FEWEST_BUCKETS and _mean_bytes(module) < _SMALL_BUCKET_BYTES:
            yield Note(rule=RULE.id, where=evidence.source_of(module.source), text=_text(module, distributed))


def _mean_bytes(module: Replication) -> float:
    return sum(module.bucket_bytes) / len(module.bucket_bytes)


def _text(module: Replication, distributed: Distributed | None) -> str:
    assert distributed is not None
    small_s = min((c.small_call_s for c in distributed.collectives if c.small_call_s), default=0.0)
    price = f"; each costs about {small_s * 1e6:.0f} us of latency" if small_s else ""
    return (
        f"{len(module.bucket_bytes)} gradient buckets of {_mean_bytes(module) / 1e6:.2f} MB on average{price}: bucket_cap_mb is "
        f"{module.bucket_cap_bytes / (1 << 20):.1f}, try the default of 25"
    )


RULE = Rule(
    id="communication.small-buckets",
    title="Many small collectives where a few large ones would do",
    module=__name__,
    check=check,
    note=note,
    levers=("communication.bucket-gradients",),
)
