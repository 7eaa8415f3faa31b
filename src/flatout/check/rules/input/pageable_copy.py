"""Batches are copied to the device from pageable memory.

Costs        The driver first copies the batch into pinned memory of its own, piece by piece, and the host waits for that; the
             copy can run beside nothing.
Evidence     Copies from the host's memory by line: pinned or not, bytes, seconds; the machine's measured rates from both kinds of
             memory.
Levers       communication.pin-memory, communication.prefetch-to-device
False alarm  Small copies, which take their latency and not their rate; a batch that was made on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.uploads import RepeatedUpload, by_line, uploads

_SMALLEST_BYTES = 1 << 20
_USUAL_RATIO = 0.5
"""Pinned over pageable time on PCIe where this machine's rates were not measured."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that copies large batches from pageable memory."""
    for upload in by_line([u for u in uploads(evidence) if not u.is_pinned]):
        if upload.bytes < _SMALLEST_BYTES or upload.bytes < _SMALLEST_BYTES * upload.num / 16:
            continue
        pinned_s = _pinned_s(evidence, upload)
        low = max(0.0, upload.exposed_s - pinned_s)
        loader = next((u for u in evidence.loaders if u.fetches >= 0.5), None)
        pin = (
            "DataLoader(..., pin_memory=True)" if loader is not None else "tensor.pin_memory() where the batch is made"
        )
        yield Finding(
            where=evidence.source_of(upload.source),
            cost_s=upload.exposed_s,
            saved_s=(low, 0.95 * upload.exposed_s if low else 0.0),
            because=f"{upload.num:.0f} copies of {upload.bytes / 2**20:.1f} MiB in all from pageable memory take "
            f"{upload.exposed_s * 1e3:.2f} ms of each step; from pinned memory they take {pinned_s * 1e3:.2f} ms, and can run "
            "beside kernels",
            edit=f"{pin}, and .to(device, non_blocking=True)",
        )


def _pinned_s(evidence: Evidence, upload: RepeatedUpload) -> float:
    """The same bytes from pinned memory."""
    machine = evidence.machine
    if machine is None or not machine.h2d_pinned_bytes_per_s:
        return _USUAL_RATIO * upload.exposed_s
    return upload.bytes / machine.h2d_pinned_bytes_per_s


RULE = rule(__name__, check, title="Batches are copied from pageable memory")
