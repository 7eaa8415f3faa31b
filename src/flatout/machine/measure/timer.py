"""The only place that times: warm-up, device events, batched inner loops, and interleaved comparison.

Nothing here synchronises the device inside what it times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

from flatout.core.errors import UsageError
from flatout.core.records.record import Record
from flatout.machine.measure.stats import Estimate, median_estimate, ratio_estimate, relative_spread

# Below this a call is not timed alone: reading the clock and the events costs about 1 us, 2 % of it.
SHORT_CALL_S = 50e-6
# A batch lasts ten times as long, and stays below CUDA's queue of about 1000 launches.
BATCH_S = 500e-6
_FEWEST_SETTLED = 3
MAX_BATCH = 500
# More samples do not narrow the interval enough to pay for keeping them.
MAX_SAMPLES = 1000


class TimerClock(Protocol):
    """Tells how long `num_calls` calls of `fn`, one after the other, take in all."""

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float: ...


class HostClock:
    """The host's time; `settle` runs after each sample, untimed (on a GPU: wait until the queue is empty)."""

    def __init__(
        self, now_s: Callable[[], float] = time.perf_counter, settle: Callable[[], None] | None = None
    ) -> None:
        self._now_s = now_s
        self._settle = settle

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
        start_s = self._now_s()
        for _ in range(num_calls):
            fn()
        elapsed_s = self._now_s() - start_s
        if self._settle is not None:
            self._settle()
        return elapsed_s


class CudaClock:
    """The device's time between two events on its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
        with torch.cuda.device(self._device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(num_calls):
                fn()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device | str) -> TimerClock:
    """Device events on a GPU, the host's clock on a CPU.

    Raises UsageError for another kind of device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return CudaClock(device)
    if device.type == "cpu":
        return HostClock()
    raise UsageError(f"cannot time on device '{device}'; 'cpu' and 'cuda' can be timed")


def host_clock_for(device: torch.device | str) -> HostClock:
    """The host's clock; on a GPU the queue is emptied after each sample, so that no sample waits for the one before."""
    device = torch.device(device)
    return HostClock() if device.type == "cpu" else HostClock(settle=lambda: torch.cuda.synchronize(device))


class Timing(Record, frozen=True, kw_only=True):
    """Seconds that one call takes.

    `call_s` is the median with its interval, `samples_s` each sample's mean over `calls_per_sample` calls, `spread` the
    interquartile range over the median. `ratio` (only from `compare_times`) is this call's time over the first one's, paired
    by round: below 1 is faster.
    """

    call_s: Estimate
    samples_s: tuple[float, ...]
    calls_per_sample: int
    spread: float | None
    ratio: Estimate | None = None


def processor_share(fn: Callable[[], object], *, num_threads: int, num_calls: int) -> float:
    """Processor time this process got over what `num_threads` busy threads ask for; near 1 on an idle machine.

    `fn` must keep all threads busy all the time. Below 0.9, something else was running and ate what is missing.
    """
    used_s = -time.process_time()
    wall_s = HostClock().elapsed_s(fn, num_calls)
    used_s += time.process_time()
    return used_s / (wall_s * num_threads)


def time_call(
    fn: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    min_time_s: float = 0.2,
    max_time_s: float = 2.0,
    warmup: int = 3,
    clock: TimerClock | None = None,
) -> Timing:
    """How long one call of `fn` takes.

    Samples for `min_time_s`, and on until there are 11 of them, but not past `max_time_s` (at least one is taken).
    Warm-up stops at a quarter of `max_time_s`. Calls below 50 us are timed in batches.
    """
    return compare_times(
        {"call": fn}, device=device, min_time_s=min_time_s, max_time_s=max_time_s, warmup=warmup, clock=clock
    )["call"]


def compare_times(
    fns: dict[str, Callable[[], object]],
    *,
    device: torch.device | str = "cpu",
    min_time_s: float = 0.5,
    max_time_s: float = 10.0,
    warmup: int = 3,
    is_settled: bool = False,
    clock: TimerClock | None = None,
) -> dict[str, Timing]:
    """Time several calls in rounds, each call once a round, in an order that turns every round.

    A machine that slows down or is shared slows all calls of a round alike; each `ratio` to the first call is taken
    within rounds. The limits are those of `time_call` for all calls together.

    `is_settled`: each call runs once untimed before it is timed. On a CPU, what the other call did to the caches and to the
    memory that malloc holds would be timed else: one that frees 100 MiB makes the next one fault its pages in anew. Calls so long
    that there would be fewer than three rounds are timed as they come.
    """
    if not fns:
        raise UsageError("nothing to time; give at least one function")
    if not 0 <= min_time_s <= max_time_s:
        raise UsageError(f"min_time_s {min_time_s} and max_time_s {max_time_s} must satisfy 0 <= min <= max")
    clock = clock if clock is not None else clock_for(device)
    share_s = max_time_s / len(fns)
    warm = {name: _warm_up(fn, clock, warmup=warmup, limit_s=share_s / 4) for name, fn in fns.items()}
    calls = {name: _calls_per_sample(last_s) for name, (last_s, _) in warm.items()}

    is_settled &= len(fns) > 1 and 2 * _FEWEST_SETTLED * sum(last_s for last_s, _ in warm.values()) <= max_time_s
    samples: dict[str, list[float]] = {name: [] for name in fns}
    warm_s = sum(used_s for _, used_s in warm.values())
    sampled_s = round_s = 0.0
    names = list(fns)
    for num_rounds in range(MAX_SAMPLES):
        is_enough = sampled_s >= min_time_s and num_rounds >= 11  # 11 samples: a 96 % interval that drops both extremes
        if num_rounds > 0 and (is_enough or warm_s + sampled_s + round_s > max_time_s):
            break
        round_s = 0.0
        for name in names if num_rounds % 2 == 0 else reversed(names):
            if is_settled:
                round_s += clock.elapsed_s(fns[name], 1)
            elapsed_s = clock.elapsed_s(fns[name], calls[name])
            samples[name].append(elapsed_s / calls[name])
            round_s += elapsed_s
        sampled_s += round_s
    return {name: _timing(samples[name], calls[name], samples[names[0]], is_first=name == names[0]) for name in names}


def _warm_up(fn: Callable[[], object], clock: TimerClock, *, warmup: int, limit_s: float) -> tuple[float, float]:
    """Seconds of the last call, and of all."""
    last_s = spent_s = clock.elapsed_s(fn, 1)
    for _ in range(warmup - 1):
        if spent_s >= limit_s:
            break
        last_s = clock.elapsed_s(fn, 1)
        spent_s += last_s
    return last_s, spent_s


def _calls_per_sample(call_s: float) -> int:
    if call_s >= SHORT_CALL_S:
        return 1
    return min(MAX_BATCH, math.ceil(BATCH_S / max(call_s, 1e-9)))


def _timing(samples_s: list[float], calls: int, first_s: list[float], *, is_first: bool) -> Timing:
    has_ratio = not is_first and min(first_s) > 0  # zero: below the clock's resolution
    return Timing(
        call_s=median_estimate(samples_s),
        samples_s=tuple(samples_s),
        calls_per_sample=calls,
        spread=relative_spread(samples_s),
        ratio=ratio_estimate(samples_s, first_s) if has_ratio else None,
    )
