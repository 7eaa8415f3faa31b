"""A small copy to the device makes the host wait until the device has done all work before it.

Costs        `x.to(device)` returns when the copy is done, and the copy queues behind the kernels of the step before. The queue
             runs empty: until the host is ahead again, the device waits for every launch.
Evidence     Copies to the device by line that the host waits for, with the wait, the bytes, and the device's idle time.
Levers       communication.non-blocking-copies
False alarm  A device that is busy all the time; steps in which the host waits elsewhere as well (overhead.host-read), where only
             all of it together helps. Batches of a MiB and more are told by input.pageable-copy and input.blocking-copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import idle_seconds
from flatout.machine.cost.uploads import RepeatedUpload, by_line, uploads

_LARGE_BYTES: Final = 1 << 20
_SMALLEST_FRACTION: Final = 0.005
"""Of a step, that the host waits at such copies."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all lines with such copies: the host waits at the next where it does not at the first."""
    if evidence.steps.device_s is None:
        return
    waits = {
        u.source: wait_s for u in by_line(uploads(evidence)) if _is_small(u) and (wait_s := _wait_s(evidence, u)) > 0
    }
    wait_s, step_s = sum(waits.values()), evidence.steps.step_s
    if wait_s < _SMALLEST_FRACTION * step_s:
        return
    idle_s = _idle_s(evidence)
    num_reads = sum(r.calls for r in evidence.host_reads if r.on_device)
    # without the waits the step takes the longer of device and host: the idle time is all there is to gain, and each wait that is
    # left has its part of it
    saved_s = min(wait_s, idle_s / (1 + num_reads))
    if saved_s < _SMALLEST_FRACTION * step_s:
        return
    first = max(waits, key=lambda source: waits[source])
    yield Finding(
        where=evidence.source_of(first),
        cost_s=wait_s,
        saved_s=(0.3 * saved_s, saved_s),
        because=f"copies to the device at {len(waits)} line{'s' if len(waits) > 1 else ''} make the host wait {wait_s * 1e3:.2f} "
        "ms of each step for what the device computes before them, which then idles while the queue fills again; it idles "
        f"{idle_s * 1e3:.2f} ms of the step",
        edit=".to(device, non_blocking=True); above 64 KiB also .pin_memory() before it",
        also=evidence.sources_of(waits),
        basis="timed",
    )


def _idle_s(evidence: Evidence) -> float:
    """What the device idles because launches come late, not between kernels that were queued in time."""
    idle_s, step = idle_seconds(evidence), evidence.device_step
    if step is None or not step.gaps:
        return idle_s
    return min(idle_s, sum(gap.seconds for gap in step.gaps if gap.cause != "unknown"))


def _is_small(upload: RepeatedUpload) -> bool:
    return not upload.is_async and upload.num >= 0.5 and upload.bytes < _LARGE_BYTES * upload.num


def _wait_s(evidence: Evidence, upload: RepeatedUpload) -> float:
    """What the host waits besides the copy's own time."""
    machine = evidence.machine
    rates = (machine.h2d_pinned_bytes_per_s, machine.h2d_pageable_bytes_per_s) if machine is not None else (None, None)
    rate = rates[0] if upload.is_pinned else rates[1]
    return max(0.0, upload.exposed_s - (upload.bytes / rate if rate else 0.0))


RULE = rule(__name__, check, title="The host waits for the device at small copies to it", rewrites_line=True)
