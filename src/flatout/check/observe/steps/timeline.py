"""When which phase began in a step: a handful of time stamps, on a GPU also as events on its own clock."""

from __future__ import annotations

import statistics
from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import Final, NamedTuple

import torch

from flatout.check.observe.steps.schedule import Mode

UNWATCHED: Final = "unwatched"
"""The mode of a step of which nothing but its length is known."""

COMPILE: Final = "compile"
"""The phase while torch.compile compiles, whatever phase of the step it fell into."""
_ORDERED_STEPS: Final = 500
"""Steps whose order of phases is stored: one of them is drawn, and a long run must not fill the memory."""

_COMPARED: Final = 8
"""Light steps whose median stands for the beginning, and for now."""
_GROWN: Final = 1.3
"""Times as long: beyond what other processes do to a step for a while."""


class PhaseStart(NamedTuple):
    """The start of a phase: `host_s` on the host's clock, `event` on the device's."""

    phase: str
    host_s: float
    event: torch.cuda.Event | None


class _Waiting(NamedTuple):
    """A step that the device has perhaps not finished yet."""

    mode: str
    phase_starts: list[PhaseStart]
    root_calls: int
    num_starts: int
    weight: int
    evaluation_calls: int = 0
    compile_s: float = 0.0
    """Of unwatched steps: what compiling took of the last."""
    hosts_s: tuple[float, ...] = ()
    """Of unwatched steps: the seconds of each on the host."""


class TimedStep(NamedTuple):
    """One finished step: its length and the seconds in each phase."""

    mode: str
    duration_s: float
    phases: dict[str, float]
    root_calls: int
    num_switches: int
    weight: int = 1
    """How many steps of the loop this one stands for."""
    order: tuple[tuple[str, float], ...] = ()
    """(phase, seconds) as they followed one another; stored for the first steps only."""
    num_starts: int = 0
    """Iterators over loaders that were created in it: epochs that began."""
    evaluation_calls: int = 0
    """Those of the root calls that ran in evaluation mode or without gradients."""


class PhaseTimeline:
    """The phases of the step in progress.

    Forward runs from the call of a root module to the backward (the loss in between belongs to it); when no backward follows,
    it ends where the module returned and the rest is other host work.
    """

    def __init__(self, *, use_events: bool) -> None:
        self.phase = "other"
        self.steps: list[TimedStep] = []
        self.root_calls = 0
        self.evaluation_calls = 0
        self.last_phase_starts: list[PhaseStart] = []
        """Those of the step that ended last."""
        self.num_starts = 0
        self._use_events = use_events
        self._free: list[torch.cuda.Event] = []
        self._phase_starts: list[PhaseStart] = [self._start_of("other")]
        self._forward_end: PhaseStart | None = None
        self._waiting: deque[_Waiting] = deque()
        self._unwatched: PhaseStart | None = None

    @property
    def num_ended(self) -> int:
        """Entries filed in `steps`, or to be filed there once the device has got so far."""
        return len(self.steps) + sum(max(1, len(w.hosts_s)) for w in self._waiting)

    def switch(self, phase: str) -> None:
        """The step enters `phase` now."""
        if phase != self.phase or self._forward_end is not None:
            self._begin(phase)

    def end_root(self, resume: str) -> None:
        """A root module returned: forward ends here unless a backward follows."""
        self._forward_end = self._start_of(resume)

    def boundary(self, mode: str, *, weight: int = 1) -> float:
        """End the step, begin the next, and return the host's seconds of the one that ended."""
        self._begin("other")
        phase_starts, self._phase_starts = self._phase_starts, [self._phase_starts[-1]]
        self.last_phase_starts = phase_starts
        calls, self.root_calls = self.root_calls, 0
        evaluation_calls, self.evaluation_calls = self.evaluation_calls, 0
        starts, self.num_starts = self.num_starts, 0
        step = _Waiting(mode, phase_starts, calls, starts, weight, evaluation_calls)
        if self._use_events:
            self._waiting.append(step)
            self._collect()
        else:
            self._file(step, [b.host_s - a.host_s for a, b in pairwise(phase_starts)])
        return phase_starts[-1].host_s - phase_starts[0].host_s

    def record_unwatched_end(self) -> None:
        """Record on the device that the last of the unwatched steps ends now.

        One event for them all: timing events between short steps cost an H200's host up to 75 us each (measured).
        """
        self._unwatched = self._start_of("other")

    def add_unwatched(self, quiet_s: list[float], last_s: float, *, compile_s: float = 0.0) -> None:
        """File steps that went by unwatched: some of which nothing is known but their seconds, and one more.

        What compiling took of the last, and the epochs that began in it, are known; `compile_s` is not in `last_s`. Where their
        end was marked on a device, the host's seconds are stretched to the device's for all of them.
        """
        starts, self.num_starts = self.num_starts, 0
        if self._use_events:
            phase_starts: list[PhaseStart] = []
            if self._unwatched is not None:
                phase_starts, self._phase_starts = [self._phase_starts[-1], self._unwatched], [self._unwatched]
                self._unwatched = None
            self._waiting.append(_Waiting(UNWATCHED, phase_starts, 0, starts, 0, 0, compile_s, (*quiet_s, last_s)))
            self._collect()
            return
        self._file_unwatched([*quiet_s, last_s], starts, compile_s)

    def restart(self) -> None:
        """Forget the time since the last phase began: it was ours."""
        self._phase_starts = [self._start_of(self.phase)]
        self._forward_end = None
        self.root_calls = self.evaluation_calls = self.num_starts = 0

    def drain(self) -> None:
        """Read all events that are still under way; waits for the device."""
        for step in reversed(self._waiting):
            if step.phase_starts and (last := step.phase_starts[-1].event) is not None:
                last.synchronize()
                break
        self._collect()

    def _begin(self, phase: str) -> None:
        if self._forward_end is not None and phase != "backward":
            self._phase_starts.append(self._forward_end)
        self._forward_end = None
        self.phase = phase
        self._phase_starts.append(self._start_of(phase))

    def _start_of(self, phase: str) -> PhaseStart:
        event = None
        if self._use_events:
            event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
            event.record()
        return PhaseStart(phase, perf_counter(), event)

    def _collect(self) -> None:
        while self._waiting:
            step = self._waiting[0]
            events = [m.event for m in step.phase_starts]
            last = events[-1] if events else None
            if last is not None and not last.query():
                return
            self._waiting.popleft()
            lengths = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events) if a is not None and b is not None]
            if step.mode == UNWATCHED:
                host_s = sum(step.hosts_s)
                stretch = (sum(lengths) - step.compile_s) / host_s if lengths and host_s > 0 else 1.0
                self._file_unwatched([s * stretch for s in step.hosts_s], step.num_starts, step.compile_s)
            else:
                self._file(step, lengths)
            # The last one begins the next step; the others' events are reused, which is cheaper than creating new ones.
            self._free += [e for e in events[:-1] if e is not None]

    def _file_unwatched(self, durations_s: list[float], num_starts: int, compile_s: float) -> None:
        """File steps of which only the last has more than its seconds."""
        *quiet_s, last_s = durations_s
        self.steps += [TimedStep(UNWATCHED, s, {}, 0, 0, weight=0) for s in quiet_s]
        phases = {COMPILE: compile_s} if compile_s else {}
        self.steps.append(TimedStep(UNWATCHED, last_s, phases, 0, 0, weight=0, num_starts=num_starts))

    def _file(self, step: _Waiting, lengths: list[float]) -> None:
        """File a step whose phases took so long."""
        order = tuple(zip((m.phase for m in step.phase_starts), lengths, strict=False))
        phases: dict[str, float] = {}
        for phase, length in order:
            phases[phase] = phases.get(phase, 0.0) + length
        order = order if len(self.steps) < _ORDERED_STEPS else ()
        num = len(step.phase_starts)
        self.steps.append(
            TimedStep(
                step.mode,
                sum(lengths),
                phases,
                step.root_calls,
                num,
                step.weight,
                order,
                step.num_starts,
                step.evaluation_calls,
            )
        )


def has_grown_since_looks(steps: list[TimedStep]) -> bool:
    """Whether the last light steps take far longer than those around the close looks, as when a text is generated."""
    looks = [i for i, s in enumerate(steps) if s.mode == Mode.DEEP.value]
    light = [(i, s.duration_s) for i, s in enumerate(steps) if s.mode in (Mode.LIGHT.value, UNWATCHED)]
    if not looks or len(light) < 2 * _COMPARED:
        return False
    near = sorted(light, key=lambda row: min(abs(row[0] - look) for look in looks))[:_COMPARED]
    latest_s = statistics.median(seconds for _, seconds in light[-_COMPARED:])
    return latest_s > _GROWN * statistics.median(seconds for _, seconds in near)
