"""Collectives that the host runs itself (gloo): their time on the host's threads, and the part in which it computed nothing."""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Final

from flatout.records.distributed import Collective
from flatout.traces.events import ELEMENT_BYTES, HostOp
from flatout.traces.host import HostStep, is_operator
from flatout.traces.intervals import length, union, without
from flatout.traces.reading import TraceFile

_PREFIXES: Final = ("gloo:", "mpi:", "ucc:")


def host_collective_events(trace: TraceFile, step: HostStep) -> list[HostOp]:
    """Collectives of a step on the host's threads, in order."""
    events = (e for e in (*trace.annotations, *trace.operators) if e.name.startswith(_PREFIXES))
    return sorted(e for e in events if step.start_ns <= e.start_ns < step.end_ns)


def host_collectives(trace: TraceFile, step: HostStep) -> tuple[Collective, ...]:
    """Collectives of a step by name and phase; exposed while no operator ran on any thread of the host."""
    mine = host_collective_events(trace, step)
    if not mine:
        return ()
    computing = union(
        (event.start_ns, event.end_ns)
        for nesting in step.nestings.values()
        for event in nesting.events
        if is_operator(event.name)
    )
    groups: dict[tuple[str, str], list[HostOp]] = defaultdict(list)
    for event in mine:
        groups[event.name, step.phase_at(event.start_ns)].append(event)
    rows = []
    for (name, phase), own in groups.items():
        backend, _, op = name.partition(":")
        exposed = without(union((e.start_ns, e.end_ns) for e in own), computing)
        rows.append(
            Collective(
                op=op,
                source=-1,
                phase=phase,
                backend=backend,
                group_size=max((e.group_size for e in own), default=0),
                num=len(own),
                bytes=sum(_bytes(e) for e in own),
                seconds=sum(e.end_ns - e.start_ns for e in own) * 1e-9,
                exposed_s=length(exposed) * 1e-9,
            )
        )
    return tuple(sorted(rows, key=lambda c: -c.seconds))


def _bytes(event: HostOp) -> int:
    """What one rank put in, by the shapes; 0 without them."""
    sizes = (
        prod(shape) * ELEMENT_BYTES.get(dtype, 0) for shape, dtype in zip(event.shapes, event.dtypes, strict=False)
    )
    return event.bytes or sum(sizes)
