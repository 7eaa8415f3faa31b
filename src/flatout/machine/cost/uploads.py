"""Copies of batches from the host's memory to a device, by line, from the device's own clock where that was watched."""

from __future__ import annotations

from typing import NamedTuple

from flatout.core.records.evidence import Evidence
from flatout.machine.cost.accounting import group_by

_HOST_TO_DEVICE = "host-to-device"


class RepeatedUpload(NamedTuple):
    """All copies of one kind from one line in a step: their number, their bytes together, and what they take of the step.

    `exposed_s` is the host's wait or the device's copying beside which nothing ran, whichever is longer.
    """

    source: int
    is_pinned: bool
    is_async: bool
    num: float
    bytes: float
    exposed_s: float


def uploads(evidence: Evidence) -> list[RepeatedUpload]:
    """All copies to a device in a step."""
    if evidence.device_step is not None and evidence.device_step.copies:
        return [
            RepeatedUpload(
                source=c.source,
                is_pinned=c.memory == "pinned",
                is_async=c.is_async,
                num=c.num,
                bytes=c.bytes,
                exposed_s=max(c.host_s, c.seconds - c.overlapped_s),
            )
            for c in evidence.device_step.copies
            if c.direction == _HOST_TO_DEVICE and c.memory in ("pinned", "pageable") and c.source >= 0
        ]
    return [
        RepeatedUpload(
            source=u.source,
            is_pinned=" pinned" in u.detail,
            is_async=u.detail.endswith("async"),
            num=u.calls,
            bytes=u.calls * u.bytes,
            exposed_s=u.seconds,
        )
        for u in evidence.uses
        if u.detail.startswith(_HOST_TO_DEVICE)
    ]


def by_line(found: list[RepeatedUpload]) -> list[RepeatedUpload]:
    """One upload for each line: sums; pinned and asynchronous only where all of its copies are."""
    return [
        RepeatedUpload(
            source=source,
            is_pinned=all(u.is_pinned for u in same),
            is_async=all(u.is_async for u in same),
            num=sum(u.num for u in same),
            bytes=sum(u.bytes for u in same),
            exposed_s=sum(u.exposed_s for u in same),
        )
        for source, same in group_by(found, lambda u: u.source).items()
    ]
