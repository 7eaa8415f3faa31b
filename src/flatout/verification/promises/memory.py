"""Memory: the most bytes that the region's own allocations held at one moment, from the allocators' entries in the tape.

What was there before the region does not count, nor does freeing it make room. On a device it is the region's largest device;
memory of the host counts where no device was used. What a compiler allocates while it compiles does not count, nor what a thread
allocates on the CPU that the region started (the entries are those of the region's own thread, and of autograd's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flatout.verification.promises.tape import Placed, Spot


class Allocation(NamedTuple):
    """One entry: `size` bytes taken (or given back, when below 0) at an address of a device, at a moment, for an operator."""

    start_ns: int
    device: str
    address: int
    size: int
    spot: Spot


class Held(NamedTuple):
    """Bytes that a line's operator held at the peak."""

    bytes: int
    op: str
    site: int


class Peak(NamedTuple):
    """The most that was held at one moment on a device, and by what, the largest first."""

    device: str
    bytes: int
    held: tuple[Held, ...] = ()


def allocations_of(events: Placed) -> Iterator[Allocation]:
    """The allocators' entries in one stretch."""
    for event, spot in events:
        if event.block is not None:
            yield Allocation(event.start_ns, *event.block, spot)


def peak_of(allocations: Iterable[Allocation]) -> Peak:
    """The peak of the device that counts."""
    entries = sorted(allocations, key=lambda a: a.start_ns)
    devices = sorted({a.device for a in entries if not a.spot.is_compiling})
    accelerators = [d for d in devices if not d.startswith("cpu")]
    peaks = [_peak_on([a for a in entries if a.device == d], d) for d in accelerators or devices]
    return max(peaks, key=lambda p: p.bytes, default=Peak("cpu", 0))


def _peak_on(entries: list[Allocation], device: str) -> Peak:
    live: dict[int, Allocation] = {}
    held = most = 0
    at_peak: list[Allocation] = []
    for entry in entries:
        if entry.size > 0 and not entry.spot.is_compiling:
            live[entry.address] = entry
            held += entry.size
        elif entry.size < 0 and entry.address in live:
            held -= live.pop(entry.address).size
            continue
        if held > most:
            most, at_peak = held, []
        if held == most and not at_peak:
            at_peak = list(live.values())
    return Peak(device, most, _by_line(at_peak))


def _by_line(blocks: list[Allocation]) -> tuple[Held, ...]:
    rows: dict[tuple[str, int], int] = {}
    for block in blocks:
        outside = "compiled code" if block.spot.compiled else "allocated outside operators"
        key = (block.spot.op or outside, block.spot.site)
        rows[key] = rows.get(key, 0) + block.size
    return tuple(sorted((Held(size, *key) for key, size in rows.items()), reverse=True))
