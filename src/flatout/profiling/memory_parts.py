"""From the storages of one step to the Memory record: the parts alive at the peak, and the curve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import msgspec

from flatout.profiling import device_memory
from flatout.profiling.process_memory import Malloc, ProcessPeak, memory_limit
from flatout.profiling.storages import Event, Peak, Storages, Stored, alive_at, peak_of
from flatout.records.memory import Memory, MemoryKind, MemoryPart, MemoryPoint, RetainedGraph

_PARTS_BY_LINE: Final = 48
"""Parts told with their line; smaller ones of a kind are added up."""
_POINTS: Final = 200
_HIGHER: Final = 1.01
"""By this factor malloc's greatest height must exceed the tensors' before an operator's own workspace is told."""


class Watched(NamedTuple):
    """One watched step: its storages, and the machine's own accounting of it."""

    storages: Storages
    start_resident: int | None
    start_malloc: Malloc | None
    malloc_at_peak: Malloc | None
    process: ProcessPeak
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
    inside = _inside_operator(watched, peak) if device == "cpu" else None
    peak = inside.peak if inside is not None else peak
    parts = _parts(alive_at(storages, device, peak.event))
    if device == "cpu":
        spare = inside.malloc if inside is not None else watched.malloc_at_peak
        parts += tuple(_besides_tensors(watched, storages.start_bytes(device), spare))
        parts += _resident(inside.part, parts, watched.process.resident_bytes) if inside is not None else ()
        measured, reserved, total = watched.process.resident_bytes, None, memory_limit()
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


class _Inside(NamedTuple):
    """A peak within an operator, whose own workspace is the larger part of it that no tensor accounts for."""

    peak: Peak
    malloc: Malloc
    part: MemoryPart


def _inside_operator(watched: Watched, peak: Peak) -> _Inside | None:
    """The moment at which malloc had most in use, where that is above the largest sum of tensors."""
    height, start = watched.process.height, watched.start_malloc
    if height is None or start is None:
        return None
    storages = watched.storages
    besides = start.used - storages.start_bytes("cpu")
    workspace = height.malloc.used - besides - height.moment.live_bytes
    if workspace <= 0 or height.moment.live_bytes + workspace <= _HIGHER * peak.bytes:
        return None
    event = height.moment.num_events - 1
    maker = next((s for s in storages.all if s.born > event and s.device == "cpu"), None)
    phase = storages.events[min(event + 1, len(storages.events) - 1)].phase if storages.events else peak.phase
    part = MemoryPart(
        kind="temporaries",
        bytes=workspace,
        num_tensors=0,
        source=maker.site if maker is not None else -1,
        module=maker.module if maker is not None else "",
        example="inside an operator",
    )
    return _Inside(Peak(event, height.moment.live_bytes + workspace, phase), height.malloc, part)


def _resident(part: MemoryPart, others: tuple[MemoryPart, ...], resident_bytes: int | None) -> tuple[MemoryPart, ...]:
    """A workspace as far as it can have been in memory: its pages cannot be asked for, since its address is not known."""
    if resident_bytes is None:
        return (part,)
    num_bytes = min(part.bytes, resident_bytes - sum(p.bytes for p in others))
    return (msgspec.structs.replace(part, bytes=num_bytes),) if num_bytes > 0 else ()


def _besides_tensors(watched: Watched, start_bytes: int, spare: Malloc | None) -> Iterator[MemoryPart]:
    """The process without its tensors as the step began, and what malloc kept for later at the peak."""
    free = watched.start_malloc.free if watched.start_malloc is not None else 0
    if watched.start_resident is not None:
        yield MemoryPart(kind="process", bytes=max(0, watched.start_resident - start_bytes - free), num_tensors=0)
    if spare is not None:
        yield MemoryPart(kind="cached", bytes=spare.free, num_tensors=0)


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
