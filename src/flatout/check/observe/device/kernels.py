"""What the device did in a step, from the profiler's records of its kernels and copies and of the calls that launched them.

Four steps in a row are watched. The first opens the profiler and lets the device come to its usual rhythm; the second is the one
that counts, profiled and otherwise undisturbed; the third is profiled with a log of the operators, which lends its lines. Under
such a log torch runs compiled code as it was before. So where code is compiled, the fourth profile has the operators and their
shapes, without a log; else the fourth step is left alone.
"""

from __future__ import annotations

import statistics
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns, time_ns
from typing import Final

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from flatout.check.observe.device.clocks import Clocks, read_clocks
from flatout.check.observe.device.launches import LaunchLog, PlaceLog, carried_over, named_calls
from flatout.check.observe.steps.timeline import PhaseStart
from flatout.check.traces.activity import Activity, device_spans, device_window
from flatout.check.traces.events import CallPlace, DeviceFacts, DeviceWork, HostCall
from flatout.check.traces.intervals import Interval
from flatout.check.traces.kineto import TraceFile, read_trace
from flatout.check.traces.step_operators import operators_of_step
from flatout.core.errors import RecordError
from flatout.core.records.device import DeviceStep
from flatout.core.records.distributed import Collective
from flatout.core.records.evidence import Operator
from flatout.core.records.span import Span

_NUM_ANCHORS: Final = 3
_FAR_NS: Final = 1_000_000_000
"""An anchor this far from where the wall clock puts it is not ours."""


class Recording:
    """One stretch of profiling: starts the profiler and ties its clock to ours."""

    def __init__(self, *, with_operators: bool) -> None:
        """`with_operators` records what launched the kernels, too, and the shapes of its tensors; the host is slower then."""
        activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if with_operators else [])]
        self._profile = profile(activities=activities, record_shapes=with_operators, acc_events=True)
        self._profile.start()
        self._wall_offset_ns = time_ns() - perf_counter_ns()
        self._anchors = record_anchors()

    def stop(self) -> tuple[TraceFile, int]:
        """The trace, and what has to be added to our clock to get the trace's.

        Raises RecordError when the trace cannot be read, RuntimeError when the profiler fails.
        """
        self._profile.stop()
        with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
            path = Path(folder) / "step.json"
            self._profile.export_chrome_trace(str(path))
            trace = read_trace(path)
        return trace, self._offset_ns(trace)

    def _offset_ns(self, trace: TraceFile) -> int:
        """The offset by the events recorded right after the start, which both clocks know; else by the wall clock."""
        rough = self._wall_offset_ns - trace.base_ns
        calls = sorted(c for c in trace.calls if "EventRecord" in c.name)[: len(self._anchors)]
        if len(calls) == len(self._anchors) > 0:
            pairs = zip(calls, self._anchors, strict=True)
            exact = round(statistics.median((c.start_ns + c.end_ns) / 2 - ours for c, ours in pairs))
            if abs(exact - rough) < _FAR_NS or not trace.base_ns:
                return exact
        return rough


class KernelTimes:
    """Profiles the device between `begin` and `end` of four steps; see above.

    `device_step`, `collectives` and `spans` are filled after the second step without lines, after the third with them;
    `operators` after the fourth, where code is compiled. `busy_s` is the device's busy time of the second step. All stay empty
    when the driver does not let this process profile.
    """

    def __init__(self, log: Callable[[], LaunchLog | None], *, is_compiled: Callable[[], bool]) -> None:
        """`log` makes the log for the third step; None when operators must not be intercepted.

        `is_compiled` says by then whether the script runs compiled code.
        """
        self.busy_s: float | None = None
        self.device_step: DeviceStep | None = None
        self.collectives: tuple[Collective, ...] = ()
        self.operators: tuple[Operator, ...] = ()
        self.spans: tuple[Span, ...] = ()
        self.num_spans_left_out = 0
        self.failure = ""
        self._make_log = log
        self._is_compiled = is_compiled
        self._num = 0
        self._recording: Recording | None = None
        self._log: LaunchLog | None = None
        self._began_ns = 0
        self._clocks = Clocks()
        self._timed: _TimedStep | None = None

    def begin(self) -> None:
        """A step that is to be profiled begins; starting the profiler takes up to a second the first time."""
        if self._num == 0:
            self._clocks = read_clocks(torch.cuda.current_device())
        if self._num in (0, 2):
            self._start(with_operators=False)
        elif self._num == 3 and self._is_compiled():
            self._start(with_operators=True)
        if self._num == 2 and self._recording is not None:
            self._log = self._make_log()
            if self._log is not None:
                self._log.enter()
        self._began_ns = perf_counter_ns()

    def end(self, starts: Sequence[PhaseStart]) -> None:
        """The step ended; `starts` say when which of its phases began."""
        borders = self._began_ns, perf_counter_ns()
        if self._num == 1 and self._recording is not None:
            self._conclude_timed(borders, starts)
        elif self._num == 2 and self._recording is not None:
            self._conclude_logged(borders)
        elif self._num == 3 and self._recording is not None:
            self._conclude_compiled(borders, starts)
        self._num += 1

    def abort(self) -> None:
        """Stop in the middle of a step and forget what is not complete."""
        if self._log is not None:
            self._log.leave()
            self._log = None
        self._stop()
        self._num = 0

    def _start(self, *, with_operators: bool) -> None:
        try:
            self._recording = Recording(with_operators=with_operators)
        except (AssertionError, RuntimeError) as e:  # the driver does not let this process profile: all stays unknown
            self.failure = f"the device could not be profiled: {str(e)[:120]}"

    def _stop(self) -> tuple[TraceFile, int] | None:
        """End the recording; what it holds, None where there is none or it cannot be read."""
        recording, self._recording = self._recording, None
        try:
            return recording.stop() if recording is not None else None
        except (RecordError, AssertionError, RuntimeError, OSError) as e:
            self.failure = f"the device's profile could not be read: {str(e)[:120]}"
            return None

    def _conclude_timed(self, borders: Interval, starts: Sequence[PhaseStart]) -> None:
        stopped = self._stop()
        if stopped is not None:
            trace, offset_ns = stopped
            self._timed = _TimedStep(trace, borders, starts, offset_ns)
            self._publish({})

    def _conclude_logged(self, borders: Interval) -> None:
        log, self._log = self._log, None
        if log is not None:
            log.leave()
        stopped = self._stop()
        if stopped is None or self._timed is None or log is None:
            return
        trace, offset_ns = stopped
        start, end = (at + offset_ns for at in borders)
        calls = [c for c in trace.calls if start <= c.start_ns < end]
        places = PlaceLog(log.entries, calls, offset_ns=offset_ns)
        self._publish(carried_over(self._timed.named, named_calls(calls, trace.work), places.place_of))

    def _conclude_compiled(self, borders: Interval, starts: Sequence[PhaseStart]) -> None:
        stopped = self._stop()
        if stopped is None or not stopped[0].has_shapes:
            return
        trace, offset_ns = stopped
        start, end = (at + offset_ns for at in borders)
        step = _TimedStep(trace, borders, starts, offset_ns)
        self.operators = operators_of_step(trace, step.work, step.calls, (start, end), step.phases)

    def _publish(self, lent: dict[HostCall, CallPlace]) -> None:
        timed = self._timed
        if timed is None or not timed.work:
            return
        activity = timed.activity(lent)
        step = activity.device_step(timed.facts)
        self.busy_s = step.busy_s
        self.device_step = msgspec.structs.replace(
            step, clock_fraction=self._clocks.fraction, throttle_reasons=self._clocks.reasons
        )
        self.collectives = activity.collectives()
        self.spans, self.num_spans_left_out = device_spans(activity, origin_ns=timed.start_ns)


class _TimedStep:
    """The undisturbed profiled step: its work on the device, its calls, its phases, all on the trace's clock.

    `borders` are nanoseconds of perf_counter_ns; `offset_ns` takes them to the trace's clock.
    """

    def __init__(self, trace: TraceFile, borders: Interval, starts: Sequence[PhaseStart], offset_ns: int) -> None:
        self.start_ns, end_ns = (at + offset_ns for at in borders)
        launched = {c.correlation: c.start_ns for c in trace.calls if c.correlation}
        at = [(launched.get(w.correlation, w.start_ns), w) for w in trace.work]
        device = _main_device(trace.work)
        self.work: list[DeviceWork] = [w for moment, w in at if self.start_ns <= moment < end_ns and w.device == device]
        self.calls = [c for c in trace.calls if self.start_ns <= c.start_ns < end_ns]
        self.named = named_calls(self.calls, self.work)
        self.facts = trace.devices.get(device, DeviceFacts())
        before = [w for moment, w in at if moment < self.start_ns and w.device == device]
        self.window = device_window(before, self.work, self.start_ns)
        self.phases = [(round(m.host_s * 1e9) + offset_ns, m.phase) for m in starts]
        self._phase_starts = [start for start, _ in self.phases]

    def activity(self, lent: dict[HostCall, CallPlace]) -> Activity:
        """The step's activity with the places that another step lends."""

        def place_of(call: HostCall) -> CallPlace:
            place = lent.get(call, CallPlace())
            found = bisect_right(self._phase_starts, call.start_ns) - 1
            return place._replace(phase=self.phases[found][1]) if found >= 0 else place

        start_ns, end_ns = self.window
        return Activity(self.work, self.calls, place_of=place_of, start_ns=start_ns, end_ns=end_ns)


def record_anchors() -> list[int]:
    """Records a few events on the device's stream; returns when each was recorded on our clock."""
    event = torch.cuda.Event()
    moments = []
    for _ in range(_NUM_ANCHORS):
        before = perf_counter_ns()
        event.record()
        moments.append((before + perf_counter_ns()) // 2)
    return moments


def _main_device(work: Sequence[DeviceWork]) -> int:
    """The device with most of the work."""
    busy: dict[int, int] = {}
    for piece in work:
        busy[piece.device] = busy.get(piece.device, 0) + piece.end_ns - piece.start_ns
    return max(busy, key=lambda device: busy[device], default=0)
