"""The host waits for copies of batches from pinned memory that need no waiting.

Costs        The copy's time: the host queues nothing while it waits, and the device computes nothing while it copies.
Evidence     Copies from pinned memory by line that were issued without `non_blocking=True`, with the host's wait, or the part of
             the copy beside which no kernel ran.
Levers       communication.prefetch-to-device
False alarm  A device that is busy all the time: then the host's wait costs nothing. Copies that are asynchronous already are
             told by bandwidth.copy-not-overlapped; copies from pageable memory by input.pageable-copy.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import idle_seconds
from flatout.machine.cost.uploads import by_line, uploads

_SMALLEST_BYTES = 1 << 20


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that waits for its copies."""
    idle_s, machine = idle_seconds(evidence), evidence.machine
    rate = machine.h2d_pinned_bytes_per_s if machine is not None else None
    for upload in by_line([u for u in uploads(evidence) if u.is_pinned and not u.is_async]):
        if upload.bytes < _SMALLEST_BYTES:
            continue
        copy_s = min(upload.exposed_s, upload.bytes / rate) if rate else upload.exposed_s
        # Not waiting lets the host go ahead, for what the device idles; a stream of its own hides the copy itself as well.
        low, high = 0.5 * min(upload.exposed_s, idle_s), min(upload.exposed_s, max(copy_s, idle_s))
        yield Finding(
            where=evidence.source_of(upload.source),
            cost_s=upload.exposed_s,
            saved_s=(min(low, high), high),
            because=f"{upload.num:.0f} copies of {upload.bytes / 2**20:.1f} MiB in all from pinned memory make the host wait "
            f"{upload.exposed_s * 1e3:.2f} ms in each step; the device idles {idle_s * 1e3:.2f} ms of it",
            edit=".to(device, non_blocking=True); and copy the next batch on a torch.cuda.Stream of its own while this one "
            "is computed",
        )


RULE = rule(__name__, check, title="The host waits for copies from pinned memory")
