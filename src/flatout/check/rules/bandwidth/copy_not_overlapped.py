"""Copies between host and device run while nothing else does, though they could run beside kernels.

Costs        The copy's time, in every step: the device computes nothing meanwhile.
Evidence     Copies from or to pinned memory by their line, and how much of them ran beside kernels, on the device's own clock.
Levers       communication.prefetch-to-device
False alarm  Steps that are not bound by the device, where hiding a copy gains nothing; copies that block the host or come from
             pageable memory: input.blocking-copy and input.pageable-copy price those.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.device import Copy
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line whose asynchronous copies are exposed."""
    step = evidence.device_step
    if step is None or not evidence.steps.is_device_bound:
        return
    for source, copies in group_by(filter(_could_overlap, step.copies), lambda c: c.source).items():
        exposed_s = sum(c.seconds - c.overlapped_s for c in copies)
        total_s = sum(c.seconds for c in copies)
        num_bytes = sum(c.bytes for c in copies)
        if exposed_s <= 0:
            continue
        yield Finding(
            where=evidence.source_of(source),
            cost_s=min(exposed_s, evidence.steps.step_s),
            saved_s=(0.5 * exposed_s, 0.95 * exposed_s),
            because=f"{sum(c.num for c in copies)} copies of {num_bytes / 1e6:.1f} MB from or to pinned memory take "
            f"{total_s * 1e3:.2f} ms a step, {exposed_s * 1e3:.2f} ms of it with no kernel running",
            edit="copy the next batch on a torch.cuda.Stream of its own while this one is computed; wait_stream before using it",
        )


def _could_overlap(copy: Copy) -> bool:
    return copy.memory == "pinned" and copy.is_async and copy.direction != "device-to-device"


RULE = rule(__name__, check, title="Copies to the device that nothing runs beside")
