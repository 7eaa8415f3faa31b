"""The statistics of an accelerator's allocator for one step, without resetting the statistics that the user may read."""

from __future__ import annotations

import math
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch


class AllocatorBlock(NamedTuple):
    """Memory the allocator gave out: at this address from `start_s` to `end_s` (seconds of perf_counter)."""

    address: int
    bytes: int
    start_s: float
    end_s: float = math.inf


class DevicePeak(NamedTuple):
    """The moment at which most was allocated on a device. `begin_bytes` were when the step began.

    `blocks` are those allocated in the step and live at that moment; `freed` those live before, by address, and gone by then.
    Both are None where the allocator's history could not be had.
    """

    bytes: int
    begin_bytes: int
    at_s: float = math.nan
    blocks: tuple[AllocatorBlock, ...] | None = None
    freed: dict[int, int] | None = None


class DeviceMemory:
    """Follows the CUDA caching allocator from `start` to `stop` through its own event history.

    Where the history is in use already, or the allocator keeps none, the peak is the largest of the readings by `look`.
    """

    def __init__(self) -> None:
        self._start: dict[int, int] = {}
        self._largest: dict[int, int] = {}
        self._has_history = False
        self._clock_offset_s = 0.0

    def start(self) -> None:
        """The step to be watched begins."""
        self._start = {i: allocated(i) for i in range(torch.cuda.device_count()) if _is_used(i)}
        self._largest = dict(self._start)
        self._has_history = _history_is_free()
        self._clock_offset_s = time_ns() * 1e-9 - perf_counter()
        if self._has_history:
            torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)

    def look(self, device: int) -> None:
        """Read the allocator's statistics now."""
        self._largest[device] = max(self._largest.get(device, 0), allocated(device))

    def stop(self) -> dict[int, DevicePeak]:
        """The step is over: the peak of allocated bytes of each device."""
        if not self._has_history:
            return {i: DevicePeak(largest, self._start[i]) for i, largest in self._largest.items() if i in self._start}
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        self._has_history = False
        return {
            i: peak_of_history(begin, traces[i] if i < len(traces) else [], offset_s=self._clock_offset_s)
            for i, begin in self._start.items()
        }

    def abort(self) -> None:
        """Stop in the middle of a step, without a result."""
        if self._has_history:
            torch.cuda.memory._record_memory_history(None)
            self._has_history = False


def peak_of_history(begin_bytes: int, trace: list[dict[str, Any]], *, offset_s: float) -> DevicePeak:
    """The peak, from the allocator's events of the step.

    `offset_s` is what the events' clock (microseconds of Unix time) shows when perf_counter shows zero.
    """
    live = peak = begin_bytes
    peak_index = -1
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            live += event["size"]
            if live > peak:
                peak, peak_index = live, index
        elif event["action"] == "free_completed":
            live -= event["size"]
    live_blocks: dict[int, AllocatorBlock] = {}
    freed: dict[int, int] = {}
    for event in trace[: peak_index + 1]:
        if event["action"] == "alloc":
            live_blocks[event["addr"]] = AllocatorBlock(
                event["addr"], event["size"], event["time_us"] * 1e-6 - offset_s
            )
        elif event["action"] == "free_completed" and live_blocks.pop(event["addr"], None) is None:
            freed[event["addr"]] = event["size"]
    ends_s: dict[int, float] = {}
    for event in trace[peak_index + 1 :]:
        if event["action"] == "free_requested":
            ends_s.setdefault(event["addr"], event["time_us"] * 1e-6 - offset_s)
    blocks = tuple(b._replace(end_s=ends_s.get(b.address, math.inf)) for b in live_blocks.values())
    at_s = trace[peak_index]["time_us"] * 1e-6 - offset_s if peak_index >= 0 else -math.inf
    return DevicePeak(peak, begin_bytes, at_s, blocks, freed)


def allocated(device: int) -> int:
    """Bytes that tensors hold on this device now."""
    return int(torch.cuda.memory_allocated(device))


def reserved(device: int) -> int:
    """Bytes the allocator took from the driver."""
    return int(torch.cuda.memory_reserved(device))


def total(device: int) -> int:
    """Bytes of memory that the device has."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def retries() -> int:
    """Times an allocation had to free the cache and ask again, on all devices."""
    return sum(
        int(torch.cuda.memory_stats(i).get("num_alloc_retries", 0))
        for i in range(torch.cuda.device_count())
        if _is_used(i)
    )


def _is_used(device: int) -> bool:
    return bool(torch.cuda.memory_reserved(device))


def _history_is_free() -> bool:
    if not torch.cuda.is_initialized():  # asking the allocator before it is there ends the process
        return False
    is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return is_on is not None and not is_on() and torch.cuda.get_allocator_backend() == "native"
