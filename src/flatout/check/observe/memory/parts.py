"""Builds the Memory record from the storages of one step: the parts alive at the peak, and the curve."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Final, NamedTuple, cast

import msgspec

from flatout.check.observe.memory import device as device_memory
from flatout.check.observe.memory.device import AllocatorBlock, DevicePeak
from flatout.check.observe.memory.process import Malloc, Moment, ProcessPeak, malloc_state, memory_limit, resident_bytes
from flatout.check.observe.memory.storages import StoragePeak, Storages, Stored, alive_at, storage_peak
from flatout.core.records.memory import Memory, MemoryKind, MemoryPart, MemoryPoint, RetainedGraph

_PARTS_BY_LINE: Final = 48
"""Parts listed with their line; smaller ones of a kind are added up."""
_POINTS: Final = 200
INSIDE_OPERATOR: Final = "inside an operator"
_CLOCK_S: Final = 20e-6
"""How far the allocator's clock and ours may differ."""
_HIGHER: Final = 1.01
"""By this factor malloc's greatest height must exceed the tensors' before an operator's own workspace is listed."""


class WatchedMemory:
    """One watched step: its storages, and the machine's own accounting of it, filled in while it is watched."""

    def __init__(self, storages: Storages) -> None:
        self.storages = storages
        self.process = ProcessPeak(lambda: Moment(len(storages.events), storages.live.get("cpu", 0)))
        self.start_resident: int | None = None
        self.start_malloc: Malloc | None = None
        self.malloc_at_peak: Malloc | None = None
        self.device_peaks: dict[int, DevicePeak] = {}
        self.retained: tuple[RetainedGraph, ...] = ()

    def start(self) -> None:
        """Read the accounting as the step begins, and go on reading it."""
        self.start_resident, self.start_malloc = resident_bytes(), malloc_state()
        self.malloc_at_peak = self.start_malloc
        self.process.start()


def memories_of(watched: WatchedMemory) -> tuple[Memory, ...]:
    """A record for the host and for each device on which tensors lived."""
    devices = dict.fromkeys(s.device for s in watched.storages.all)
    names = ["cpu", *(d for d in devices if d.startswith("cuda"))]
    return tuple(_memory_of(watched, device) for device in names)


def _memory_of(watched: WatchedMemory, device: str) -> Memory:
    storages = watched.storages
    peak = storage_peak(storages, device)
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
        reserved, total = device_memory.reserved(index), device_memory.total(index)
        allocated = watched.device_peaks.get(index)
        measured = allocated.bytes if allocated is not None else None
        if allocated is not None and allocated.blocks is not None and allocated.bytes > peak.bytes:
            parts, peak = _at_allocators_peak(storages, device, allocated)
    return Memory(
        device=device,
        peak_bytes=sum(p.bytes for p in parts),
        peak_phase=peak.phase,
        at_peak=parts,
        curve=_curve(storages, device),
        measured_peak_bytes=measured,
        reserved_bytes=reserved,
        total_bytes=total,
        retained=watched.retained if device == _main_device(storages) else (),
    )


def _at_allocators_peak(
    storages: Storages, device: str, allocated: DevicePeak
) -> tuple[tuple[MemoryPart, ...], StoragePeak]:
    """What the allocator had handed out at its peak: to tensors, to operators for themselves, and to libraries for good."""
    on_device = [s for s in storages.all if s.device == device]
    freed = allocated.freed or {}
    alive = [s for s in on_device if s.born < 0 and s.address not in freed]
    by_address: dict[int, list[Stored]] = defaultdict(list)
    for stored in on_device:
        if stored.born >= 0:
            by_address[stored.address].append(stored)
    inside: list[AllocatorBlock] = []
    for block in allocated.blocks or ():
        holder = next((s for s in by_address[block.address] if _lies_in(s, block)), None)
        if holder is not None:
            alive.append(holder)
        else:
            inside.append(block)
    parts = [*_parts(alive), *_inside_operators(inside, on_device)]
    at_start = {s.address: s.bytes for s in on_device if s.born < 0}
    besides = allocated.begin_bytes - sum(at_start.values())
    besides -= sum(num_bytes for address, num_bytes in freed.items() if address not in at_start)
    if besides > 0:
        parts.append(MemoryPart(kind="process", bytes=besides, num_tensors=0, example="library workspaces"))
    event = max((i for i, e in enumerate(storages.events) if e.at_s <= allocated.at_s), default=-1)
    return tuple(parts), StoragePeak(event, sum(p.bytes for p in parts), _phase_after(storages, event))


def _lies_in(stored: Stored, block: AllocatorBlock) -> bool:
    return block.start_s - _CLOCK_S <= stored.at_s <= block.end_s + _CLOCK_S


def _inside_operators(blocks: list[AllocatorBlock], on_device: list[Stored]) -> Iterator[MemoryPart]:
    """Memory that became no tensor: the workspace of the operator whose result was filed next."""
    born = sorted((s for s in on_device if s.born >= 0), key=lambda s: s.at_s)
    sums: dict[tuple[int, str], int] = defaultdict(int)
    for block in blocks:
        maker = next((s for s in born if s.at_s >= block.start_s), None)
        sums[(maker.site, maker.module) if maker is not None else (-1, "")] += block.bytes
    for (site, module), num_bytes in sums.items():
        yield _workspace(num_bytes, site, module)


def _workspace(num_bytes: int, site: int, module: str) -> MemoryPart:
    return MemoryPart(
        kind="temporaries", bytes=num_bytes, num_tensors=0, source=site, module=module, example=INSIDE_OPERATOR
    )


def _phase_after(storages: Storages, event: int) -> str:
    """The phase of the event that follows this one."""
    return storages.events[min(event + 1, len(storages.events) - 1)].phase if storages.events else "other"


def _main_device(storages: Storages) -> str:
    """Where most of what the step created lies."""
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
        bytes=sum(s.resident_bytes for s in stored),
        num_tensors=len(stored),
        source=site,
        module=module,
        example=max(stored, key=lambda s: s.bytes).example,
    )


class _Inside(NamedTuple):
    """A peak within an operator, whose own workspace is the larger part of it that no tensor accounts for."""

    peak: StoragePeak
    malloc: Malloc
    part: MemoryPart


def _inside_operator(watched: WatchedMemory, peak: StoragePeak) -> _Inside | None:
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
    site, module = (maker.site, maker.module) if maker is not None else (-1, "")
    highest = StoragePeak(event, height.moment.live_bytes + workspace, _phase_after(storages, event))
    return _Inside(highest, height.malloc, _workspace(workspace, site, module))


def _resident(part: MemoryPart, others: tuple[MemoryPart, ...], resident_bytes: int | None) -> tuple[MemoryPart, ...]:
    """A workspace as far as it can have been in memory: its pages cannot be asked for, since its address is not known."""
    if resident_bytes is None:
        return (part,)
    num_bytes = min(part.bytes, resident_bytes - sum(p.bytes for p in others))
    return (msgspec.structs.replace(part, bytes=num_bytes),) if num_bytes > 0 else ()


def _besides_tensors(watched: WatchedMemory, start_bytes: int, spare: Malloc | None) -> Iterator[MemoryPart]:
    """The process without its tensors as the step began, and what malloc had cached at the peak."""
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
            points[bucket] = MemoryPoint(at=round(at, 5), bytes=live, phase=event.phase)
    return tuple(points[bucket] for bucket in sorted(points))
