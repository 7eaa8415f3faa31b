"""Kernels: how many were run forward and backward, which, and for which lines.

On a device they are the kernels that the profiler saw executed there, by whichever thread and stream, those of a replayed CUDA
graph one by one; copies and memsets are none. On a CPU they are the operators that compute (see `operators.operator_kind`), each
once whatever it is composed of inside, and the kernels that a compiler generated. A region that ran any kernel on a device counts
those alone. What a compiler runs while it compiles does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

from flatout.tune.verify.expect.operators import operator_kind
from flatout.tune.verify.expect.tape import (
    DeviceEvent,
    EventSpot,
    EventsWithSpots,
    HostEvent,
    TapeSegment,
    region_window,
    spots_by_number,
)
from flatout.tune.verify.expect.tape_annotations import KERNEL, site_of

GRAPH: Final = "## Call CompiledFxGraph"
"""The beginning of the name of the event that lies around a compiled graph of Inductor's."""

Ran = Literal["kernel", "operator", "generated kernel", "compiled graph"]


class KernelLaunch(NamedTuple):
    """One kernel that ran: what, for which line (an index, -1 unknown), in a backward or not."""

    name: str
    site: int
    is_backward: bool
    ran: Ran


def launches_of(segment: TapeSegment, events: EventsWithSpots) -> list[KernelLaunch]:
    """All kernels of one stretch, in the order in which they were asked for."""
    if any(e.kind == "kernel" for e in segment.on_devices):
        return device_kernels(segment.on_devices, spots_by_number(events), region_window(segment))
    sites = {id(e): spot for e, spot in events}
    return [launch for root in segment.roots for launch in _below(root, sites)]


def device_kernels(
    events: Sequence[DeviceEvent], by_event: Mapping[int, EventSpot], window: tuple[int, int]
) -> list[KernelLaunch]:
    """The kernels that were launched in the window, each with the spot of the host's event that launched it."""
    calls = {e.correlation: e for e in events if e.kind == "call" and e.correlation}
    found = []
    for event in sorted((e for e in events if e.kind == "kernel"), key=lambda e: e.start_ns):
        call = calls.get(event.correlation)
        began_ns = call.start_ns if call is not None else event.start_ns
        linked = event.linked or (call.linked if call is not None else 0)
        spot = by_event.get(linked, EventSpot())
        if window[0] <= began_ns <= window[1] and not spot.is_compiling:
            found.append(KernelLaunch(event.name, spot.site, spot.is_backward, "kernel"))
    return found


def _below(event: HostEvent, sites: dict[int, EventSpot]) -> list[KernelLaunch]:
    """What counts of an event on a CPU, from the outside in. Autograd's own threads have trees of their own."""
    spot = sites[id(event)]
    name = event.name
    if spot.is_compiling:
        return []
    if name.startswith(KERNEL):
        return [KernelLaunch(name.rpartition(":")[2], spot.site, spot.is_backward, "generated kernel")]
    kind = operator_kind(name, event.overload) if "::" in name else "none"
    if kind == "kernel":
        return [KernelLaunch(name, _annotated_in(event, spot.site), spot.is_backward, "operator")]
    inside = [launch for child in event.children for launch in _below(child, sites)]
    if not inside and kind == "foreign":
        return [KernelLaunch(name, spot.site, spot.is_backward, "operator")]
    if not inside and name.startswith(GRAPH):
        return [KernelLaunch("a graph whose kernels leave no trace", spot.site, spot.is_backward, "compiled graph")]
    return inside


def _annotated_in(event: HostEvent, otherwise: int) -> int:
    """The line of an operator: its mark lies inside, since the mode that makes it is asked below autograd."""
    while event.children:
        event = event.children[0]
        site = site_of(event.name)
        if site is not None:
            return site
    return otherwise
