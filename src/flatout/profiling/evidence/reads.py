"""Values read from a device and copies to it, by line."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import cast

from flatout.profiling.observer import Observer
from flatout.records.evidence import HostRead, Phase
from flatout.records.usage import CallUse


def host_reads_of(observer: Observer) -> tuple[HostRead, ...]:
    """Reads by line from the steps that watched for them, and those only the operators show (boolean indexing and the like)."""
    n = max(1, observer.reads.num_steps)
    rows = [
        HostRead(
            source=r.site,
            call=r.call,
            calls=len(times) / n,
            wait_s=sum(times) / n,
            phase=cast(Phase, r.phase),
            on_device=r.on_device,
        )
        for r, times in observer.reads.seen.items()
    ]
    seen = {r.source for r in rows}
    deep = Counter(read for step in observer.deep.steps for read in step.reads)
    for (site, call, phase, on_device), count in deep.items():
        if site not in seen and site >= 0:
            calls = count / len(observer.deep.steps)
            rows.append(
                HostRead(source=site, call=call, calls=calls, wait_s=0.0, phase=cast(Phase, phase), on_device=on_device)
            )
    return tuple(rows)


def uploads_of(observer: Observer) -> tuple[CallUse, ...]:
    """Copies from the host's memory to a device, by line, from the step that watched for them."""
    n = max(1, observer.reads.num_steps)
    return tuple(
        CallUse(
            name=f"Tensor.{u.call}",
            source=u.site,
            calls=len(copies) / n,
            seconds=sum(s for _, s in copies) / n,
            bytes=round(statistics.fmean(b for b, _ in copies)),
            detail=f"host-to-device {'pinned' if u.is_pinned else 'pageable'} {'async' if u.is_async else 'blocking'}",
            phase=u.phase,
        )
        for u, copies in observer.reads.uploads.items()
    )
