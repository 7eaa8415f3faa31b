"""Kernels and copies of the device, by a profiler in four steps of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from flatout.check.observe.collector import Collector
from flatout.check.observe.device.kernels import KernelTimes
from flatout.check.observe.device.launches import LaunchLog
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.device import DeviceStep
from flatout.core.records.evidence import Evidence, Steps


class KernelProfiling(Collector):
    """Profiles the device in the KERNELS steps."""

    def __init__(self, observation: ObservationState) -> None:
        self.times = KernelTimes(self._launch_log, is_compiled=lambda: observation.is_compiled)
        self._observation = observation

    def begin(self, mode: Mode) -> None:
        """Start the profiler in a KERNELS step."""
        if mode is Mode.KERNELS:
            self.times.begin()

    def end(self, mode: Mode) -> None:
        """Read what the profiler recorded."""
        if mode is Mode.KERNELS:
            self.times.end(self._observation.timeline.last_phase_starts)

    def restart(self) -> None:
        """Forget what is not complete."""
        self.times.abort()

    def remove(self) -> None:
        """Stop the profiler in the middle of a step."""
        self.times.abort()

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `device_step`, of compiled code the operators of a step, and to the timeline the spans on the device."""
        times, timeline = self.times, evidence.timeline
        if timeline is not None and times.spans:
            timeline = msgspec.structs.replace(
                timeline,
                spans=(*timeline.spans, *times.spans),
                num_left_out=timeline.num_left_out + times.num_spans_left_out,
            )
        step = times.device_step
        return msgspec.structs.replace(
            evidence,
            timeline=timeline,
            device_step=step and _in_honest_time(step, evidence.steps),
            kernel_operators=times.operators,
        )

    def notes(self) -> Iterator[str]:
        """Why the device could not be profiled."""
        if self.times.failure:
            yield self.times.failure

    def _launch_log(self) -> LaunchLog | None:
        """The log that lends kernels their lines; None for compiled code, which interception would switch off."""
        observation = self._observation
        if not observation.is_interception_allowed():
            return None
        return LaunchLog(observation.sites, phase=observation.phase, module=observation.calls.module_path)


def _in_honest_time(step: DeviceStep, steps: Steps) -> DeviceStep:
    """What the device did in the profiled step, how much longer that took than an honest one, and the honest one's gaps.

    Kernels take as long profiled as not; what the profiler adds, it adds to the host, and so to the gaps. The device idles in an
    honest step for what its busy time leaves of it, before each line in the share that was profiled.
    """
    if not steps.step_s:
        return step
    profiled_s = sum(g.seconds for g in step.gaps)
    scale = max(0.0, steps.step_s - step.busy_s) / profiled_s if profiled_s else 1.0
    gaps = tuple(msgspec.structs.replace(g, seconds=g.seconds * scale) for g in step.gaps)
    return msgspec.structs.replace(step, slowdown=step.span_s / steps.step_s, gaps=gaps)


COLLECTOR: Final = CollectorEntry(KernelProfiling)
