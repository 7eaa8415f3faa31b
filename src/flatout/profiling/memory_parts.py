"""From the storages of one step to the Memory record: the parts alive at the peak, and the curve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

from flatout.profiling import device_memory
from flatout.profiling.process_memory import Malloc, memory_limit
from flatout.profiling.storages import Event, Storages, Stored, alive_at, peak_of
from flatout.records.memory import Memory, MemoryKind, MemoryPart, MemoryPoint, RetainedGraph

_PARTS_BY_LINE: Final = 48
"""Parts told with their line; smaller ones of a kind are added up."""
_POINTS: Final = 200


class Watched(NamedTuple):
    """One watched step: its storages, and the machine's own accounting of it."""

    storages: Storages
    start_resident: int | None
    start_malloc: Malloc | None
    malloc_at_peak: Malloc | None
    peak_resident: int | None
    device_peaks: dict[int, int]
    retained: tuple[RetainedGraph, ...]


def memories_of(watched: Watched) -> tuple[Memory, ...]:
    """A record for the host and for each device on which tensors lived."""
    devices = dict.fromkeys(s.device for s in watched.storages.all)
    names = ["cpu", *(d for d in devices if d.startswith("cuda"))]
    return tuple(_memory_of(watched, device) for device in names)


def _memory_of(watched: Watched, device: str) -> Memory:
    storages = watched.storages
    peak = peak_of(storages, device)
    parts = _parts(alive_at(storages, device, peak.event))
    if device == "cpu":
        parts += tuple(_besides_tensors(watched, storages.start_bytes(device)))
        measured, reserved, total = watched.peak_resident, None, memory_limit()
    else:
        index = int(device.partition(":")[2] or 0)
        measured, reserved = watched.device_peaks.get(index), device_memory.reserved(index)
        total = device_memory.total(index)
    return Memory(
        device=device,
        peak_bytes=sum(p.bytes for p in parts),
        peak_phase=peak.phase,
        at_peak=parts,
        curve=_curve(storages, device),
        measured_peak_bytes=measured,
        reserved_bytes=reserved,
        total_bytes=total,
        retained=tuple(r for r in watched.retained) if device == _main_device(storages) else (),
    )


def _main_device(storages: Storages) -> str:
    """Where most of what the step made lies."""
    sums: dict[str, int] = defaultdict(int)
    for stored in storages.all:
        sums[stored.device] += stored.bytes
    return max(sums, key=lambda d: sums[d], default="cpu")


def _kind(stored: Stored) -> MemoryKind:
    if stored.kind:
        return cast(MemoryKind, stored.kind)
    if stored.born < 0:
        return "kept"
    return "activations" if stored.is_saved else "temporaries"


def _parts(alive: list[Stored]) -> tuple[MemoryPart, ...]:
    """What is alive, by kind, line and module; the largest first, small ones of a kind together."""
    groups: dict[tuple[MemoryKind, int, str], list[Stored]] = defaultdict(list)
    for stored in alive:
        groups[_kind(stored), stored.site, stored.module].append(stored)
    order = sorted(groups, key=lambda key: -sum(s.bytes for s in groups[key]))
    rest: dict[MemoryKind, list[Stored]] = defaultdict(list)
    for key in order[_PARTS_BY_LINE:]:
        rest[key[0]] += groups[key]
    parts = [_part(*key, groups[key]) for key in order[:_PARTS_BY_LINE]]
    return (*parts, *(_part(kind, -1, "", stored) for kind, stored in rest.items()))


def _part(kind: MemoryKind, site: int, module: str, stored: list[Stored]) -> MemoryPart:
    return MemoryPart(
        kind=kind,
        bytes=sum(s.held for s in stored),
        num_tensors=len(stored),
        source=site,
        module=module,
        example=max(stored, key=lambda s: s.bytes).example,
    )


def _besides_tensors(watched: Watched, start_bytes: int) -> Iterator[MemoryPart]:
    """The process without its tensors as the step began, and what malloc kept for later at the peak."""
    free = watched.start_malloc.free if watched.start_malloc is not None else 0
    if watched.start_resident is not None:
        yield MemoryPart(kind="process", bytes=max(0, watched.start_resident - start_bytes - free), num_tensors=0)
    if watched.malloc_at_peak is not None:
        yield MemoryPart(kind="cached", bytes=watched.malloc_at_peak.free, num_tensors=0)


def _curve(storages: Storages, device: str) -> tuple[MemoryPoint, ...]:
    """The living bytes over the step, the highest moment of each of many short stretches."""
    events = [e for e in storages.events if e.device == device]
    if not events:
        return ()
    begin_s, end_s = storages.events[0].at_s, storages.events[-1].at_s
    span_s = max(1e-9, end_s - begin_s)
    live = storages.start_bytes(device)
    points: dict[int, MemoryPoint] = {}
    for event in events:
        live += event.bytes
        at = min(1.0, max(0.0, (event.at_s - begin_s) / span_s))
        bucket = int(at * (_POINTS - 1))
        if bucket not in points or live > points[bucket].bytes:
            points[bucket] = _point(at, live, event)
    return tuple(points[bucket] for bucket in sorted(points))


def _point(at: float, live: int, event: Event) -> MemoryPoint:
    return MemoryPoint(at=round(at, 5), bytes=live, phase=event.phase)
