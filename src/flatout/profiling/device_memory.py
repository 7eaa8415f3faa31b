"""What an accelerator's allocator says of one step, without resetting the statistics that the user may read."""

from __future__ import annotations

from typing import Any

import torch


class DeviceMemory:
    """Follows the CUDA caching allocator from `start` to `stop` through its own event history.

    Where the history is in use already, or the allocator keeps none, the peak is the largest of the readings by `look`.
    """

    def __init__(self) -> None:
        self._start: dict[int, int] = {}
        self._largest: dict[int, int] = {}
        self._has_history = False

    def start(self) -> None:
        """A step begins."""
        self._start = {i: allocated(i) for i in range(torch.cuda.device_count()) if _is_used(i)}
        self._largest = dict(self._start)
        self._has_history = _history_is_free()
        if self._has_history:
            torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=1_000_000)

    def look(self, device: int) -> None:
        """Read now."""
        self._largest[device] = max(self._largest.get(device, 0), allocated(device))

    def stop(self) -> dict[int, int]:
        """The step is over: the peak of allocated bytes of each device."""
        if not self._has_history:
            return self._largest
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(None)
        self._has_history = False
        return {i: _peak(begin, traces[i] if i < len(traces) else []) for i, begin in self._start.items()}

    def abort(self) -> None:
        """Stop without an answer."""
        if self._has_history:
            torch.cuda.memory._record_memory_history(None)
            self._has_history = False


def _peak(begin: int, trace: list[dict[str, Any]]) -> int:
    live = peak = begin
    for event in trace:
        if event["action"] == "alloc":
            live += event["size"]
            peak = max(peak, live)
        elif event["action"] == "free_completed":
            live -= event["size"]
    return peak


def allocated(device: int) -> int:
    """Bytes that tensors hold on this device now."""
    return int(torch.cuda.memory_allocated(device))


def reserved(device: int) -> int:
    """Bytes the allocator took from the driver."""
    return int(torch.cuda.memory_reserved(device))


def total(device: int) -> int:
    """Bytes the device has."""
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
    is_on = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return is_on is not None and not is_on() and torch.cuda.get_allocator_backend() == "native"
