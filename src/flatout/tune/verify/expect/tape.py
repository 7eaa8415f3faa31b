"""The profiler's tape of one stretch of a region, in plain values: a tree of events for each thread, and what devices did."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple

import torch
from torch.autograd import profiler as autograd_profiler
from torch.profiler import ProfilerActivity, profile

from flatout.core.errors import UsageError
from flatout.tune.verify.expect.operators import operator_kind
from flatout.tune.verify.expect.tape_annotations import BACKWARD, COMPILING, REGION, site_of

_CHOOSING: Final = "CachingAutotuner."
"""The beginning of the name of Inductor's event around the runs of a kernel that choose its tiles, at its first call."""
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
_ABOVE_STATE: Final = "6"
"""The first level of kineto's log without lines of the kind `USDT`, which torch 2.13 writes at each start and stop."""
_ENGINE: Final = "autograd::engine::evaluate_function"
_COMPILED: Final = "Torch-Compiled Region: "
_NOTES: Final = ("[", "flatout.", _COMPILED)
"""Annotations, and notes of the allocator (`[memory]`), which the profiler files under the device."""
_RUNTIME: Final = re.compile(r"(cuda|cu|hip)[A-Z]")
"""How calls of a device's runtime or driver begin."""


class MemoryBlock(NamedTuple):
    """Memory that an allocator gave out, or took back when `bytes` is below 0."""

    device: str
    address: int
    bytes: int


class HostEvent:
    """One event of the host, with those that lie in it. Its `number` is what device events are linked by.

    `sequence` is autograd's, -1 for none; `block` is there for entries of allocators.
    """

    __slots__ = ("block", "children", "end_ns", "name", "number", "overload", "sequence", "start_ns")

    def __init__(self, torchs: Any) -> None:
        fields = torchs.extra_fields
        self.name: str = torchs.name
        self.overload: str = getattr(torchs, "overload_name", "")
        self.start_ns: int = torchs.start_time_ns
        self.end_ns: int = torchs.end_time_ns
        self.number: int = torchs.correlation_id
        self.sequence: int = getattr(fields, "sequence_number", -1)
        is_memory = torchs.tag.name == "Allocation"
        self.block = MemoryBlock(str(fields.device), fields.ptr or 0, fields.alloc_size) if is_memory else None
        self.children: list[HostEvent] = []


class EventSpot(NamedTuple):
    """Where an event of the tape belongs.

    `site` is the user's line (-1: none is known), `op` the operator around it, `compiled` the compiled region that it lies in,
    as '1/0' (dynamo's number of the frame, and which of its versions).
    """

    site: int = -1
    is_backward: bool = False
    is_compiling: bool = False
    op: str = ""
    compiled: str = ""


class DeviceEvent(NamedTuple):
    """What a device did, or a call of its runtime (`kind` 'call').

    `correlation` joins the two; `linked` is the number of the host's event that it was launched from, 0 for none.
    """

    kind: Literal["kernel", "copy", "set", "call"]
    name: str
    start_ns: int
    correlation: int
    linked: int
    device: int = 0


class TapeSegment(NamedTuple):
    """One stretch that was recorded: the roots of its trees, and the events of devices."""

    roots: Sequence[HostEvent]
    on_devices: tuple[DeviceEvent, ...] = ()


class Tape:
    """Starts and stops torch's profiler. Raises UsageError when another one is running: there can be only one."""

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self) -> None:
        """Begin to record, in this thread and in autograd's."""
        if autograd_profiler._is_profiler_enabled:
            raise UsageError(
                "a profiler is running already, and torch has one at a time; end it before the region, or leave `expect` out"
            )
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        config = torch._C._profiler._ExperimentalConfig(capture_overload_names=True)
        self._profile = profile(activities=activities, profile_memory=True, experimental_config=config)
        with _quiet_start():
            self._profile.start()

    def stop(self) -> TapeSegment:
        """What was recorded. The host waits for devices here, after the region's end."""
        running, self._profile = self._profile, None
        running.stop()
        results = running.profiler.kineto_results
        return TapeSegment(_tree(results.experimental_event_tree()), tuple(_device_events(results.events())))


@contextmanager
def _quiet_start() -> Iterator[None]:
    """Keep the profiler's lines about its own state out of stderr; it reads its level once, at the first start in a process.

    A level that the user has set counts; the variable is gone again afterwards.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _ABOVE_STATE
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


EventsWithSpots = list[tuple[HostEvent, EventSpot]]
"""All events of a take with their spots."""


def with_spots(segment: TapeSegment, frame_sites: dict[str, int]) -> EventsWithSpots:
    """Every event with its spot, parents before their children; `frame_sites` are lines of compiled frames, by their number.

    What runs in a backward without a mark of its own has the line of its forward, found by autograd's sequence number.
    """
    line_of_node: dict[int, int] = {}
    found: EventsWithSpots = []
    waiting = [(event, EventSpot()) for event in reversed(segment.roots)]
    while waiting:
        event, around = waiting.pop()
        spot = _entered(event, around, frame_sites, line_of_node)
        found.append((event, spot))
        waiting.extend((child, spot) for child in reversed(event.children))
    return found


def _entered(
    event: HostEvent, around: EventSpot, frame_sites: dict[str, int], line_of_node: dict[int, int]
) -> EventSpot:
    name = event.name
    site = site_of(name)
    if site is not None:
        return around._replace(site=site, is_backward=around.is_backward or name.startswith(BACKWARD))
    if name == COMPILING or name.startswith(_CHOOSING):
        return around._replace(is_compiling=True)
    if name.startswith(_COMPILED):
        number = name[len(_COMPILED) :].strip()
        return around._replace(site=frame_sites.get(number.partition("/")[0], around.site), compiled=number)
    if name.startswith(_ENGINE):
        return around._replace(is_backward=True, site=line_of_node.get(event.sequence, around.site))
    if event.sequence >= 0 and not around.is_backward and around.site >= 0:
        line_of_node[event.sequence] = around.site
    return around._replace(op=name) if "::" in name and operator_kind(around.op) != "kernel" else around


def spots_by_number(events: EventsWithSpots) -> dict[int, EventSpot]:
    """The spots by the number of their event, which device events are linked by."""
    return {event.number: spot for event, spot in events}


def region_window(segment: TapeSegment) -> tuple[int, int]:
    """When the outermost region began and ended in this stretch, in the tape's nanoseconds."""
    found = [e for e in segment.roots if e.name == REGION]
    return (min(e.start_ns for e in found), max(e.end_ns for e in found)) if found else (0, 0)


def _tree(roots: Sequence[Any]) -> list[HostEvent]:
    """The profiler's tree as events of our own: torch makes new ones whenever it is asked."""
    found: list[HostEvent] = []
    waiting: list[tuple[Any, list[HostEvent]]] = [(root, found) for root in reversed(roots)]
    while waiting:
        torchs, siblings = waiting.pop()
        event = HostEvent(torchs)
        siblings.append(event)
        waiting.extend((child, event.children) for child in reversed(torchs.children))
    return found


def _device_events(events: Sequence[Any]) -> Iterator[DeviceEvent]:
    for e in events:
        name = e.name()
        is_on_host = e.device_type() == torch._C._autograd.DeviceType.CPU
        if is_on_host and not _RUNTIME.match(name):
            continue
        if e.is_user_annotation() or name.startswith(_NOTES):
            continue
        kind: Literal["kernel", "copy", "set", "call"] = "call" if is_on_host else "kernel"
        if not is_on_host and name.startswith(("Memcpy", "Memset")):
            kind = "copy" if name.startswith("Memcpy") else "set"
        yield DeviceEvent(kind, name, e.start_ns(), e.correlation_id(), e.linked_correlation_id(), e.device_index())
