"""Memory: the most bytes that the region's own allocations held at one moment, from the allocators' entries in the tape.

What was there before the region does not count, nor does freeing it make room. On a device it is the region's largest device;
memory of the host counts where no device was used. What a compiler allocates while it compiles does not count, nor what a thread
allocates on the CPU that the region started (the entries are those of the region's own thread, and of autograd's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flatout.tune.verify.expect.tape import EventSpot, EventsWithSpots


class Allocation(NamedTuple):
    """One entry: `size` bytes taken (or given back, when below 0) at an address of a device, at a moment, for an operator."""

    start_ns: int
    device: str
    address: int
    size: int
    spot: EventSpot


class LiveBytes(NamedTuple):
    """Bytes that a line's operator held at the peak."""

    bytes: int
    op: str
    site: int


class RegionPeak(NamedTuple):
    """The most that was held at one moment on a device, and by what, the largest first."""

    device: str
    bytes: int
    live: tuple[LiveBytes, ...] = ()


def allocations_of(events: EventsWithSpots) -> Iterator[Allocation]:
    """The allocators' entries in one stretch."""
    for event, spot in events:
        if event.block is not None:
            yield Allocation(event.start_ns, *event.block, spot)


def region_peak(allocations: Iterable[Allocation]) -> RegionPeak:
    """The peak of the device that counts."""
    entries = sorted(allocations, key=lambda a: a.start_ns)
    devices = sorted({a.device for a in entries if not a.spot.is_compiling})
    accelerators = [d for d in devices if not d.startswith("cpu")]
    peaks = [_peak_on([a for a in entries if a.device == d], d) for d in accelerators or devices]
    return max(peaks, key=lambda p: p.bytes, default=RegionPeak("cpu", 0))


def _peak_on(entries: list[Allocation], device: str) -> RegionPeak:
    live: dict[int, Allocation] = {}
    num_bytes = most = 0
    at_peak: list[Allocation] = []
    for entry in entries:
        if entry.size > 0 and not entry.spot.is_compiling:
            live[entry.address] = entry
            num_bytes += entry.size
        elif entry.size < 0 and entry.address in live:
            num_bytes -= live.pop(entry.address).size
            continue
        if num_bytes > most:
            most, at_peak = num_bytes, []
        if num_bytes == most and not at_peak:
            at_peak = list(live.values())
    return RegionPeak(device, most, _by_line(at_peak))


def _by_line(blocks: list[Allocation]) -> tuple[LiveBytes, ...]:
    rows: dict[tuple[str, int], int] = {}
    for block in blocks:
        outside = "compiled code" if block.spot.compiled else "allocated outside operators"
        key = (block.spot.op or outside, block.spot.site)
        rows[key] = rows.get(key, 0) + block.size
    return tuple(sorted((LiveBytes(size, *key) for key, size in rows.items()), reverse=True))
