"""Many small tensors are copied to the device one by one from one line.

Costs        The latency of each copy, whatever its size, and the host's wait for it.
Evidence     Copies from the host's memory by line: how many in a step, their bytes and seconds.
Levers       communication.pack
False alarm  A few tensors of one batch; large tensors, which take their rate and not their latency.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import idle_seconds
from flatout.machine.cost.uploads import by_line, uploads

_MANY = 8
_SMALL_BYTES = 64 << 10


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that copies many small tensors in a step."""
    machine = evidence.machine
    rate = machine.h2d_pageable_bytes_per_s if machine is not None else None
    for upload in by_line(uploads(evidence)):
        if upload.num < _MANY or upload.bytes > _SMALL_BYTES * upload.num:
            continue
        one_s = upload.exposed_s / upload.num + (upload.bytes / rate if rate else 0.0)
        gained = max(0.0, upload.exposed_s - one_s)
        if evidence.steps.device_s is not None:
            gained = min(gained, idle_seconds(evidence))
        yield Finding(
            where=evidence.source_of(upload.source),
            cost_s=upload.exposed_s,
            saved_s=(0.6 * gained, gained),
            because=f"{upload.num:.0f} copies to the device in each step from this line, "
            f"{upload.bytes / upload.num / 1024:.1f} KiB each, {upload.exposed_s * 1e3:.2f} ms in all; one copy "
            f"of them together takes {one_s * 1e3:.2f} ms",
            edit="put them together on the host first (torch.stack or one flat tensor), copy once, and split on the device",
        )


RULE = rule(__name__, check, title="Many small copies to the device")
