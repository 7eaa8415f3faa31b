"""What observing costs: unit prices, measured on this machine in some milliseconds."""

from __future__ import annotations

import statistics
from time import perf_counter
from typing import Final, NamedTuple

import torch

from flatout.check.observe.steps.blocks import WATCHED_ROOT_DEVICE_S, WATCHED_ROOT_S
from flatout.check.observe.steps.timeline import PhaseTimeline, TimedStep
from flatout.core.runtime.source_sites import Sites
from flatout.machine.measure.stats import median_estimate

_CALLS: Final = 300
_RECORDED_CALLS: Final = 100
"""Fewer where each is recorded, since the script waits: 70 us each (a core of an EPYC of family 25)."""
MODULE_CALL_S: Final = 0.3e-6
"""What our function adds to a call of a module, also of one inside a root module (a 2026 server core, Python 3.11)."""
_PER_HANDLER: Final = 2.0
"""A sample takes twice the time of its handler: the rest is what the signal does to the caches (the same core)."""
_UNWATCHED_STEP_S: Final = 20e-6
"""What an unwatched step pays for the hooks of optimizer and backward, the functions of torch that are watched, and its stamp.

The upper end of what a step of 0.23 ms took longer in all: 7 to 20 us and 13 to 19 us in two measurements (SGD on one layer,
a core of an EPYC of family 25).
"""
_FEWEST_COMPARED: Final = 12


class InterceptionCost(NamedTuple):
    """Seconds that recording adds to one operator: inside its measured time, to the Python before it, on the device."""

    in_op_s: float
    in_python_s: float
    in_device_s: float = 0.0


def interception_cost(sites: Sites, *, is_device: bool) -> InterceptionCost:
    """The price of recording one tiny operator in a deep step, less what it costs unobserved."""
    from flatout.check.observe.operators.recorder import OperatorRecorder

    x = torch.ones(4)
    plain = min(_loop_s(x, _CALLS) for _ in range(5)) / _CALLS
    recorder = OperatorRecorder(sites, phase=lambda: "other", module=lambda: "", is_device=False)
    found: list[tuple[float, float]] = []
    with recorder:
        for _ in range(5):
            recorder.begin()
            _loop_s(x, _RECORDED_CALLS)
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


def _loop_s(x: torch.Tensor, num_calls: int) -> float:
    start = perf_counter()
    for _ in range(num_calls):
        x.neg()
    return perf_counter() - start


class LightWork(NamedTuple):
    """What light observation did besides the steps that it watched."""

    module_calls: float
    """Calls of modules that went through our function."""
    sampler_s: float
    """Handlers of samples."""
    other_s: float
    """What was measured by itself."""
    ordinary_s: list[float]
    """Seconds of the watched steps without more root calls than usual."""
    unwatched_s: list[float]
    """Seconds of steps that went by unwatched."""


def light_cost_s(watched: list[TimedStep], work: LightWork, *, is_device: bool) -> float:
    """Seconds that light observation took: by unit prices, and by how much longer watched steps were than unwatched ones.

    The larger counts. Steps in which an evaluation or a rollout lies have no counterpart among the unwatched.
    """
    scratch = PhaseTimeline(use_events=is_device)
    start = perf_counter()
    for _ in range(_CALLS):
        scratch.switch("forward")
    switch_s = (perf_counter() - start) / _CALLS
    root_s = WATCHED_ROOT_DEVICE_S if is_device else WATCHED_ROOT_S
    priced_s = sum(s.num_switches * switch_s + s.root_calls * root_s for s in watched)
    beside_s = len(work.unwatched_s) * _UNWATCHED_STEP_S
    beside_s += work.module_calls * MODULE_CALL_S + _PER_HANDLER * work.sampler_s + work.other_s
    return max(priced_s, len(watched) * _longer_s(work)) + beside_s


def _longer_s(work: LightWork) -> float:
    """How much longer a watched step was for being watched, at least; 0 where there are too few of either to tell."""
    if min(len(work.ordinary_s), len(work.unwatched_s)) < _FEWEST_COMPARED:
        return 0.0
    return max(0.0, median_estimate(work.ordinary_s).low - median_estimate(work.unwatched_s).high)
