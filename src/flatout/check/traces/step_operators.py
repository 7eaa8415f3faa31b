"""Operators and compiled kernels of one step that was profiled among undisturbed ones, with the device's time of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import msgspec

from flatout.check.traces.activity import Activity, device_window
from flatout.check.traces.events import DeviceWork, HostCall
from flatout.check.traces.host import HostStep, Lines
from flatout.check.traces.intervals import Interval
from flatout.check.traces.kernel_names import short_kernel_name
from flatout.check.traces.kineto import TraceFile
from flatout.check.traces.rows import OperatorRows
from flatout.core.records.evidence import Operator, Phase
from flatout.machine.cost.families import BARE_KERNEL


def operators_of_step(
    trace: TraceFile,
    work: Sequence[DeviceWork],
    calls: Sequence[HostCall],
    borders: Interval,
    phases: Sequence[tuple[int, str]],
) -> tuple[Operator, ...]:
    """Rows of a step's operators, without lines; the longest on the device first.

    Args:
        trace: the profile with operators and their shapes.
        work: what the device did for the step.
        calls: the step's calls of the device's runtime.
        borders: start and end of the step on the host, nanoseconds of the trace's clock.
        phases: when each phase began on that clock, in order; the last one ends with the step.
    """
    start_ns, end_ns = borders
    ends = [start for start, _ in phases[1:]] + [end_ns] * bool(phases)
    host = HostStep(
        borders,
        thread=0,
        operators=trace.operators,
        annotations=(),
        functions=(),
        lines=Lines(),
        phases=[(start, end, phase) for (start, phase), end in zip(phases, ends, strict=True)],
    )
    own = set(work)
    launched = {c.correlation: c.start_ns for c in trace.calls if c.correlation}
    before = (w for w in trace.work if w not in own and launched.get(w.correlation, w.start_ns) < start_ns)
    begins_ns, done_ns = device_window(before, work, start_ns)
    activity = Activity(work, calls, place_of=host.place_of, start_ns=begins_ns, end_ns=done_ns)
    rows = OperatorRows(host, activity, is_device_bound=True).operators
    launching = [msgspec.structs.replace(row, python_s=0.0) for row in rows if row.op_s > 0]
    return tuple(sorted((*launching, *_bare_kernels(host, activity)), key=lambda row: -row.op_s))


def _bare_kernels(host: HostStep, activity: Activity) -> list[Operator]:
    """Work that was launched outside of all operators, by its kernel's name."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for piece in activity.linked:
        if not piece.place.op:
            phase = piece.place.phase if piece.call is not None else host.phase_at(piece.work.start_ns)
            rows[short_kernel_name(piece.work.name), phase].append(piece.work.end_ns - piece.work.start_ns)
    return [
        Operator(
            op=f"{BARE_KERNEL}{name}",
            source=-1,
            module="",
            phase=cast(Phase, phase),
            inputs=(),
            outputs=(),
            num_calls=len(lengths_ns),
            op_s=sum(lengths_ns) * 1e-9,
            python_s=0.0,
            flop=0,
            bytes=0,
            bound="device",
        )
        for (name, phase), lengths_ns in rows.items()
    ]
