"""Where the steps of a trace begin and end: the profiler's own annotations, else the optimizer's, else the whole trace is one."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise
from typing import Final, NamedTuple

from flatout.check.traces.events import HostOp
from flatout.check.traces.intervals import Interval
from flatout.check.traces.kineto import TraceFile

_STEP: Final = "ProfilerStep"
_OPTIMIZER: Final = "Optimizer.step#"
_LEAST_WORK: Final = 0.1
"""A marked step with less than this share of the fullest step's operators is no whole step."""


class FoundSteps(NamedTuple):
    """The steps in order, the host thread that runs them, and a note on how they were found."""

    intervals: list[Interval]
    thread: int | str
    note: str
    is_whole: bool = False
    """Whether the one step is the whole trace, start-up and all."""


def find_steps(trace: TraceFile) -> FoundSteps:
    """The steps of a trace; never none, since a trace with events is at least one."""
    profiler_steps = sorted(a for a in trace.annotations if a.name.startswith(_STEP) and a.end_ns > a.start_ns)
    if profiler_steps:
        thread = Counter(a.thread for a in profiler_steps).most_common(1)[0][0]
        intervals = [(a.start_ns, a.end_ns) for a in profiler_steps if a.thread == thread]
        return FoundSteps(_whole(intervals, trace), thread, "")
    updates = sorted(a for a in trace.annotations if a.name.startswith(_OPTIMIZER))
    leader = _leader(updates)
    borders = [a.end_ns for a in updates if a.name == leader]
    if len(borders) >= 3:
        note = "steps were taken from one optimizer step to the next: the trace has no ProfilerStep annotations (prof.step())"
        return FoundSteps(list(pairwise(borders)), updates[-1].thread, note)
    everything = trace.operators or trace.annotations or trace.functions
    thread = _busiest(everything) if everything else 0
    start = min([o.start_ns for o in everything] + [w.start_ns for w in trace.work])
    end = max([o.end_ns for o in everything] + [w.end_ns for w in trace.work])
    note = (
        "no steps could be found (no prof.step(), fewer than three optimizer steps): the whole trace counts as one step"
    )
    return FoundSteps([(start, end)], thread, note, is_whole=True)


def _whole(intervals: list[Interval], trace: TraceFile) -> list[Interval]:
    """The steps that hold work: the annotation after the last step, and one at which recording ended, hold next to none."""
    starts = sorted([o.start_ns for o in trace.operators] or [c.start_ns for c in trace.calls])
    counts = [bisect_left(starts, end) - bisect_left(starts, start) for start, end in intervals]
    least = _LEAST_WORK * max(counts)
    return [interval for interval, count in zip(intervals, counts, strict=True) if count >= least]


def _leader(updates: list[HostOp]) -> str:
    """The optimizer whose step ends a cycle: of those that step most seldom (at least thrice) the last one."""
    counts = Counter(a.name for a in updates)
    often = {name: n for name, n in counts.items() if n >= 3}
    if not often:
        return ""
    fewest = min(often.values())
    last = {a.name: a.end_ns for a in updates}
    return max((name for name, n in often.items() if n == fewest), key=lambda name: last[name])


def _busiest(operators: list[HostOp]) -> int | str:
    """The thread with the most operators outside autograd's own."""
    counts = Counter(o.thread for o in operators if not o.name.startswith("autograd::"))
    return counts.most_common(1)[0][0] if counts else operators[0].thread
