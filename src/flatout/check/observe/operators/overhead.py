"""What observing costs: unit prices, measured on this machine in some milliseconds."""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Final, NamedTuple

import torch

from flatout.check.observe.steps.timeline import PhaseTimeline, TimedStep
from flatout.core.runtime.source_sites import Sites

_CALLS: Final = 300
ROOT_CALL_S: Final = 4e-6
"""Bookkeeping of one root call besides its time stamps: callers, the hook on its graph (measured on a 2026 server core)."""


class InterceptionCost(NamedTuple):
    """Seconds that recording adds to one operator: inside its measured time, to the Python before it, on the device."""

    in_op_s: float
    in_python_s: float
    in_device_s: float = 0.0


def interception_cost(sites: Sites, *, is_device: bool) -> InterceptionCost:
    """The price of recording one tiny operator in a deep step, less what it costs unobserved."""
    from flatout.check.observe.operators.recorder import OperatorRecorder

    x = torch.ones(4)
    plain = min(_loop_s(x) for _ in range(5)) / _CALLS
    recorder = OperatorRecorder(sites, phase=lambda: "other", module=lambda: "", is_device=False)
    found: list[tuple[float, float]] = []
    with recorder:
        for _ in range(5):
            recorder.begin()
            _loop_s(x)
            calls = recorder.step.calls
            found.append((sum(c.op_s for c in calls) / len(calls), sum(c.python_s for c in calls) / len(calls)))
    best = min(found, key=sum)
    excess = max(0.0, sum(best) - plain)
    in_op = min(excess, max(0.0, best[0] - 0.8 * plain))
    return InterceptionCost(in_op, excess - in_op, _event_gap_s() if is_device else 0.0)


def _event_gap_s() -> float:
    """Device seconds between two events with nothing between them, recorded while the device is busy."""
    torch.cuda._sleep(10_000_000)
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(50)]
    for start, end in pairs:
        start.record()
        end.record()
    pairs[-1][1].synchronize()
    gaps_ms: list[float] = [start.elapsed_time(end) for start, end in pairs]
    return statistics.median(gaps_ms) * 1e-3


def _loop_s(x: torch.Tensor) -> float:
    start = perf_counter()
    for _ in range(_CALLS):
        x.neg()
    return perf_counter() - start


def light_cost_s(steps: list[TimedStep], sampler_s: float, *, is_device: bool) -> float:
    """Seconds the light observation took in these steps: time stamps of phases, root calls and the sampling thread."""
    scratch = PhaseTimeline(use_events=is_device)
    start = perf_counter()
    for _ in range(_CALLS):
        scratch.switch("forward")
    switch_s = (perf_counter() - start) / _CALLS
    starts = sum(s.num_switches for s in steps)
    roots = sum(s.root_calls for s in steps)
    return starts * switch_s + roots * ROOT_CALL_S + sampler_s
