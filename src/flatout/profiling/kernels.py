"""How long the device is busy in a step, from the profiler's records of its kernels and copies."""

from __future__ import annotations

from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class KernelTimes:
    """Profiles the device alone (no operators, no stacks) for one step, between `begin` and `end`."""

    def __init__(self) -> None:
        self.busy_s: float | None = None
        self._profile: profile | None = None

    def begin(self) -> None:
        """Start to record kernels and copies; starting takes up to a second the first time."""
        try:
            self._profile = profile(activities=[ProfilerActivity.CUDA])
            self._profile.start()
        except (AssertionError, RuntimeError):  # the driver does not let this process profile: busy_s stays unknown
            self._profile = None

    def end(self) -> None:
        """Stop, and add up when anything ran on the device; streams that run beside one another count once."""
        if self._profile is None:
            return
        self._profile.stop()
        results = self._profile.profiler.kineto_results if self._profile.profiler is not None else None
        self._profile = None
        if results is None:
            return
        spans = sorted(
            (e.start_ns(), e.start_ns() + e.duration_ns())
            for e in results.events()
            if e.device_type() == DeviceType.CUDA
        )
        self.busy_s = busy_ns(spans) * 1e-9 if spans else None


def busy_ns(spans: list[tuple[int, int]]) -> int:
    """Length of the union of intervals that are sorted by their start.

    >>> busy_ns([(0, 4), (2, 6), (10, 11)])
    7
    """
    busy = 0
    end_of_last = spans[0][0] if spans else 0
    for start, end in spans:
        busy += max(0, end - max(start, end_of_last))
        end_of_last = max(end_of_last, end)
    return busy
