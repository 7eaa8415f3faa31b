"""Builds Evidence from the trace of one rank: what it shows, and in the notes what it cannot show."""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.check.traces.activity import Activity, device_spans, device_window
from flatout.check.traces.events import DeviceFacts, DeviceWork, HostOp, span_of
from flatout.check.traces.host import (
    DeviceClock,
    HostStep,
    Lines,
    host_collective_events,
    host_collectives,
    phase_seconds,
)
from flatout.check.traces.intervals import Interval
from flatout.check.traces.kineto import TraceFile
from flatout.check.traces.rows import OperatorRows, host_reads
from flatout.check.traces.steps import FoundSteps, find_steps
from flatout.core.records.distributed import Collective
from flatout.core.records.evidence import Evidence, Loader, Observing, OptimizerUse, StepKind, Steps
from flatout.core.records.span import Span, StepTimeline
from flatout.core.records.workload import Workload
from flatout.machine.measure.stats import median_estimate

_WARM: Final = 3
"""With more steps than this the first is left out of the timing: it still pays for the profiler's start."""
_MOST_HOST_SPANS: Final = 1000


class RankTrace(NamedTuple):
    """One rank's Evidence, and what a comparison of ranks needs."""

    evidence: Evidence
    rank: int
    host: str
    backend: str
    world_size: int
    collectives: tuple[Collective, ...]
    lengths_ns: list[int]
    """Length of each collective of the step that was looked into, in order."""
    step: int
    """Which of the timed steps that was."""


class _Launches(NamedTuple):
    """Device work with the start of the call that launched it (its own start when the trace has no call)."""

    launched_ns: list[int]
    work: list[DeviceWork]

    def between(self, interval: Interval) -> list[DeviceWork]:
        low, high = (bisect_right(self.launched_ns, at - 1) for at in interval)
        return self.work[low:high]

    def before(self, moment_ns: int) -> list[DeviceWork]:
        return self.work[: bisect_right(self.launched_ns, moment_ns - 1)]


def evidence_of(trace: TraceFile, command: tuple[str, ...], *, step: int | None = None) -> RankTrace:
    """What the trace shows. One step stands for all when it comes to operators, kernels and gaps: `step`, else the median one."""
    found = find_steps(trace)
    launches = _launches(trace)
    clock = DeviceClock((at, w.end_ns) for at, w in zip(launches.launched_ns, launches.work, strict=True))
    lines = Lines()
    hosts = _host_steps(trace, found, lines)
    times = [(clock.on_device(h.end_ns) - clock.on_device(h.start_ns)) * 1e-9 for h in hosts]
    typical = sorted(range(len(hosts)), key=lambda i: times[i])[(len(hosts) - 1) // 2]
    typical = step if step is not None and step < len(hosts) else typical
    host = hosts[typical]
    activity, facts = _activity(trace, host, launches)
    steps = _steps(found, hosts, times, clock, activity)
    rows = OperatorRows(host, activity, is_device_bound=steps.is_device_bound)
    collectives = activity.collectives() if activity is not None else host_collectives(trace, host)
    reads = host_reads(host, activity)
    world_size = max(trace.world_size, 1)
    evidence = Evidence(
        workload=Workload(
            command=command,
            cwd="",
            python="",
            torch="",
            device=facts.name or ("an accelerator" if activity is not None else "cpu"),
            num_cores=0,
            num_threads=0,
            world_size=world_size,
        ),
        machine=None,
        steps=steps,
        sources=tuple(lines.sources),
        operators=rows.operators if trace.has_shapes else (),
        host_reads=reads,
        optimizers=tuple(_optimizers(hosts)),
        loaders=tuple(_loaders(hosts)),
        device_step=activity.device_step(facts) if activity is not None else None,
        timeline=_timeline(host, activity),
        observing=Observing(light_fraction=0.0, deep_s=0.0, trials_s=0.0, other_s=0.0, num_deep_steps=0),
        exit="finished",
        notes=tuple(_notes(trace, found, rows, activity)),
    )
    if activity is not None:
        lengths_ns = [p.work.end_ns - p.work.start_ns for p in activity.linked if p.work.kind == "collective"]
    else:
        lengths_ns = [e.end_ns - e.start_ns for e in host_collective_events(trace, host)]
    return RankTrace(evidence, trace.rank or 0, trace.host, trace.backend, world_size, collectives, lengths_ns, typical)


class _InOrder:
    """Events by their start, cut into steps; asked for steps in their order."""

    def __init__(self, events: list[HostOp]) -> None:
        self._events = sorted(events, key=lambda e: e.start_ns)
        self._starts = [e.start_ns for e in self._events]
        self._next = 0
        self._open: list[HostOp] = []

    def within(self, start: int, end: int) -> list[HostOp]:
        """Those that begin in the step."""
        return self._events[bisect_left(self._starts, start) : bisect_left(self._starts, end)]

    def reaching_into(self, start: int, end: int) -> list[HostOp]:
        """Those that overlap the step: the ones that began earlier are carried along from step to step."""
        upto = max(self._next, bisect_left(self._starts, end))
        self._open = [e for e in (*self._open, *self._events[self._next : upto]) if e.end_ns > start]
        self._next = upto
        return self._open


def _host_steps(trace: TraceFile, found: FoundSteps, lines: Lines) -> list[HostStep]:
    operators, functions = _InOrder(trace.operators), _InOrder(trace.functions)
    annotations = _InOrder([a for a in trace.annotations if not a.name.startswith("ProfilerStep")])
    return [
        HostStep(
            (start, end),
            thread=found.thread,
            operators=operators.within(start, end),
            annotations=annotations.within(start, end),
            functions=functions.reaching_into(start, end),
            lines=lines,
        )
        for start, end in found.intervals[1 if len(found.intervals) > _WARM else 0 :]
    ]


def _launches(trace: TraceFile) -> _Launches:
    calls = {c.correlation: c.start_ns for c in trace.calls if c.correlation}
    pairs = sorted((calls.get(w.correlation, w.start_ns), w) for w in trace.work)
    return _Launches([at for at, _ in pairs], [w for _, w in pairs])


def _activity(trace: TraceFile, host: HostStep, launches: _Launches) -> tuple[Activity | None, DeviceFacts]:
    """The device's work that the step launched; of the device with most of it when there are several."""
    mine = launches.between((host.start_ns, host.end_ns))
    if not mine:
        return None, DeviceFacts()
    devices = [w.device for w in mine]
    device = max(set(devices), key=devices.count)
    own = [w for w in mine if w.device == device]
    start, end = device_window((w for w in launches.before(host.start_ns) if w.device == device), own, host.start_ns)
    calls = [c for c in trace.calls if host.start_ns <= c.start_ns < host.end_ns]
    activity = Activity(own, calls, place_of=host.place_of, start_ns=start, end_ns=end)
    return activity, trace.devices.get(device, DeviceFacts())


def _steps(
    found: FoundSteps, hosts: list[HostStep], times: list[float], clock: DeviceClock, activity: Activity | None
) -> Steps:
    interval = median_estimate(times)
    middle = statistics.median(times)
    total = sum(times) or 1.0
    sums: dict[str, float] = {}
    for host in hosts:
        for phase, seconds in phase_seconds(host, clock.on_device).items():
            sums[phase] = sums.get(phase, 0.0) + seconds
    busy_s = min(activity.busy_ns * 1e-9, middle) if activity is not None else None
    return Steps(
        kind="call" if found.is_whole else _kind(hosts),
        num_observed=len(found.intervals),
        num_timed=len(times),
        step_s=middle,
        low_s=min(interval.low, middle),
        high_s=max(interval.high, middle),
        device_s=busy_s,
        durations_s=tuple(round(t, 9) for t in times[-2000:]),
        phases={p: s / total * middle for p, s in sorted(sums.items())},
    )


def _kind(hosts: list[HostStep]) -> StepKind:
    phases = {phase for h in hosts for _, _, phase in h.phases}
    if phases & {"backward", "optimizer"}:
        return "training"
    return "inference" if "forward" in phases else "call"


def _optimizers(hosts: list[HostStep]) -> Iterator[OptimizerUse]:
    """Optimizers by the profiler's annotations; how they walk over the parameters by the operators inside."""
    names = sorted({a.name for h in hosts for a in h.annotations if a.name.startswith("Optimizer.step#")})
    for name in names:
        spans = [a for h in hosts for a in h.annotations if a.name == name]
        host = next(h for h in hosts if any(a.name == name for a in h.annotations))
        span = next(a for a in host.annotations if a.name == name)
        nesting = host.nestings.get(span.thread)
        inside = {e.name for e in nesting.events if span.start_ns <= e.start_ns < span.end_ns} if nesting else set()
        is_fused = any(n.startswith("aten::_fused_") for n in inside)
        is_foreach = any(n.startswith("aten::_foreach_") for n in inside)
        yield OptimizerUse(
            name=name.removeprefix("Optimizer.step#").partition(".")[0],
            variant="fused" if is_fused else "foreach" if is_foreach else "for-loop",
            source=host.source_at(span.thread, span.start_ns),
            constructed=-1,
            num_tensors=0,
            num_elements=0,
            step_s=statistics.median(a.end_ns - a.start_ns for a in spans) * 1e-9,
            fused_supported=False,
        )


def _loaders(hosts: list[HostStep]) -> Iterator[Loader]:
    spans = [a for h in hosts for a in h.annotations if a.name.startswith("enumerate(DataLoader)")]
    if spans:
        yield Loader(
            source=hosts[0].source_at(spans[0].thread, spans[0].start_ns),
            getitem=-1,
            collate=-1,
            dataset="a data set",
            num_workers=1 if "MultiProcessing" in spans[0].name else 0,
            batch_size=0,
            wait_s=sum(a.end_ns - a.start_ns for a in spans) * 1e-9 / len(spans),
            fetches=len(spans) / len(hosts),
            is_map_style=False,
            has_own_collate=False,
        )


def _timeline(host: HostStep, activity: Activity | None) -> StepTimeline:
    """Phases, outermost operators, device work and waits of the step that stands for all."""
    origin = host.start_ns
    spans = [
        Span(track="phase", name=phase, start_s=(start - origin) * 1e-9, duration_s=(end - start) * 1e-9)
        for start, end, phase in host.phases
    ]
    tops = [
        (event, host.source_of(nesting, i))
        for nesting in host.nestings.values()
        for i, event in enumerate(nesting.events)
        if nesting.parents[i] < 0
    ]
    ranked = sorted(tops, key=lambda t: t[0].start_ns - t[0].end_ns)
    spans += [
        span_of(event, "host", origin_ns=origin, source=source) for event, source in sorted(ranked[:_MOST_HOST_SPANS])
    ]
    num_left_out = max(0, len(ranked) - _MOST_HOST_SPANS)
    end = host.end_ns
    if activity is not None:
        end = max(end, activity.end_ns)
        on_device, dropped = device_spans(activity, origin_ns=origin)
        spans += on_device
        num_left_out += dropped
        places = [(call, host.place_of(call).source) for call in activity.waits]
        spans += [span_of(c, "host", origin_ns=origin, source=source, is_wait=True) for c, source in places]
    return StepTimeline(duration_s=(end - origin) * 1e-9, spans=tuple(spans), num_left_out=num_left_out)


def _notes(trace: TraceFile, found: FoundSteps, rows: OperatorRows, activity: Activity | None) -> Iterator[str]:
    """Notes on what the trace does not show."""
    yield from trace.notes
    if found.note:
        yield found.note
    yield "the times include what torch.profiler itself cost; trials need the running script: `flatout check` makes them"
    if trace.has_stacks:
        yield (
            "lines are those where the user's functions begin: torch.profiler's stacks do not hold the line that ran; "
            "with_stack also slows Python down"
        )
    else:
        yield "no lines: the trace has no stacks (with_stack=True records them)"
    if not trace.operators:
        yield "no operators: the trace holds the device alone (ProfilerActivity.CPU records them)"
    elif not trace.has_shapes:
        yield "no FLOP: the trace has no shapes (record_shapes=True records them)"
    elif rows.has_convolutions:
        yield "no FLOP for some convolutions: the trace does not hold the numbers they were called with"
    yield "no roofline: what the machine of the trace can do is not known here"
    if activity is not None and any(not c.call for c in activity.linked):
        yield "some kernels have no launching call in the trace: what was late before them is not known"
    if activity is None and any(a.name.startswith("cuda") for a in trace.calls):
        yield "the trace has calls of the device's runtime but nothing that ran on it (ProfilerActivity.CUDA records it)"
