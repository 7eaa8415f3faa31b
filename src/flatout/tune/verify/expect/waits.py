"""Host waits: calls in which Python waits until a device has done its work.

On a device they are the synchronising calls of its runtime that the profiler saw, whoever made them, and copies to the host's
pageable memory, during which the host waits too. On a CPU nothing waits; what counts there are the calls that would if the
tensors lay on a device: Python reads a number, or needs one to know a shape. So a test without a GPU catches them. Counters
that torch's optimizers keep on the CPU in any case are left out; a printed tensor counts once. What a
compiler does, while it compiles or chooses among kernels by their times, does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from flatout.check.traces.activity import plain_name
from flatout.tune.verify.expect.tape import DeviceEvent, EventSpot

_SYNCHRONISING: Final = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "hipDeviceSynchronize",
    "hipStreamSynchronize", "hipEventSynchronize", "hipMemcpy", "hipMemcpyWithStream", "cuStreamSynchronize",
    "cuCtxSynchronize", "cuEventSynchronize",
)  # fmt: skip
"""Taking and giving back memory (cudaMalloc, cudaFree) may wait too, but does so while the allocator's cache grows alone."""


class Wait(NamedTuple):
    """One wait: the call, and the index of its line (-1 unknown)."""

    call: str
    site: int


def device_waits(
    events: Sequence[DeviceEvent], by_event: Mapping[int, EventSpot], window: tuple[int, int]
) -> list[Wait]:
    """The waits between two moments that the runtime's calls show."""
    calls = [e for e in events if e.kind == "call" and window[0] <= e.start_ns <= window[1]]
    found: list[Wait] = []
    waiting: set[int] = set()
    for event in calls:
        spot = by_event.get(event.linked, EventSpot())
        if plain_name(event.name) in _SYNCHRONISING and not spot.is_compiling:
            waiting.add(event.linked)
            found.append(Wait(f"{spot.op} ({event.name})" if spot.op else event.name, spot.site))
    by_correlation = {e.correlation: e for e in calls if e.correlation}
    for event in events:
        call = by_correlation.get(event.correlation)
        is_pageable = event.kind == "copy" and "DtoH" in event.name and "Pageable" in event.name
        if is_pageable and call is not None and event.linked not in waiting:
            spot = by_event.get(event.linked, EventSpot())
            if not spot.is_compiling:
                found.append(Wait("copy to pageable memory", spot.site))
    return found
