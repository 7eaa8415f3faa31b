"""Looks many times a second at the line the observed thread is on, and adds up the time since the look before.

Its price is the handler's own time (some microseconds a sample), which it measures itself.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from time import perf_counter
from types import FrameType
from typing import Final, NamedTuple

from flatout.check.observe.lines.timer_signal import TimerSignal
from flatout.core.runtime.source_sites import Sites

RATE_HZ: Final = 50.0
SPARING_RATE_HZ: Final = 20.0
"""Where light observation must be cheapest; a sample costs some 80 us, half of it by what the signal does to the caches."""
UNWATCHED: Final = "unwatched"
"""The phase of a sample from a step whose phases are not recorded."""


class SampledLine(NamedTuple):
    """What a sample is filed under: the phase, the user's line, and whether the user's own frame was innermost."""

    phase: str
    site: int
    is_own: bool


class Sampler:
    """Seconds and samples by Spot, gathered while `is_on`.

    By a timer's signal where that can be had; else by a thread, which sees pure Python only where it gives the interpreter up.
    """

    def __init__(self, sites: Sites, *, phase: Callable[[], str], rate_hz: float = RATE_HZ) -> None:
        self.seconds: dict[SampledLine, float] = defaultdict(float)
        self.samples: dict[SampledLine, int] = defaultdict(int)
        self.callers: dict[int, tuple[int, ...]] = {}
        """For each line sampled: the user's lines that called its function at the first sample, innermost first."""
        self.own_s = 0.0
        self.failure = ""
        self.pending: list[tuple[SampledLine, float]] = []
        """Samples of the unwatched step in progress: what kind of step it is shows when it ends."""
        self._is_on = False
        self._is_sampling = False
        self._last_s = 0.0
        self._sites = sites
        self._phase = phase
        self._period_s = 1.0 / rate_hz
        self._thread_id = threading.get_ident()
        self._signal = TimerSignal(self._sample, period_s=self._period_s)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def is_on(self) -> bool:
        """Whether samples are counted now."""
        return self._is_on

    @is_on.setter
    def is_on(self, on: bool) -> None:
        if on and not self._is_on:
            self._last_s = perf_counter()
        self._is_on = on

    def start(self) -> None:
        """Start the timer; samples are counted only while `is_on`."""
        self._signal.start()
        if not self._signal.is_running:
            self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)
            self._thread.start()

    def spare(self) -> None:
        """Sample at the sparing rate from now on."""
        if self._period_s != 1.0 / SPARING_RATE_HZ:
            self._period_s = 1.0 / SPARING_RATE_HZ
            self._signal.set_period(self._period_s)

    def stop(self) -> None:
        """End the timer or the thread."""
        self._is_on = False
        self._signal.stop()
        self._stop.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def clear(self) -> None:
        """Forget all samples taken so far."""
        self.seconds.clear()
        self.samples.clear()
        self.pending.clear()

    def settle(self, phase: str) -> None:
        """The unwatched step ended: file its samples under `phase`."""
        for spot, seconds in self.pending:
            self._file(spot._replace(phase=phase), seconds)
        self.pending.clear()

    def by_phase(self, known: Mapping[tuple[str, int], Mapping[str, float]]) -> list[tuple[SampledLine, float, float]]:
        """Rows of (spot, seconds, samples); what was sampled in unwatched steps is shared out as its line is in the watched ones.

        `known` has the seconds by phase of lines without a sample in a watched step.
        """
        phase_s: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for spot, seconds in self.seconds.items():
            if spot.phase not in (UNWATCHED, "evaluation"):  # unwatched steps with an evaluation were settled as such
                phase_s[self._sites.line_of(spot.site)][spot.phase] += seconds
        total_s: dict[SampledLine, float] = defaultdict(float)
        counts: dict[SampledLine, float] = defaultdict(float)
        for spot, seconds in self.seconds.items():
            shares = {spot.phase: 1.0}
            if spot.phase == UNWATCHED:
                line = self._sites.line_of(spot.site)
                shares = dict(phase_s.get(line) or known.get(line) or {"other": 1.0})
            whole = sum(shares.values()) or 1.0
            for phase, share in shares.items():
                total_s[spot._replace(phase=phase)] += seconds * share / whole
                counts[spot._replace(phase=phase)] += self.samples[spot] * share / whole
        return [(spot, seconds, counts[spot]) for spot, seconds in total_s.items()]

    def _file(self, spot: SampledLine, seconds: float) -> None:
        self.seconds[spot] += seconds
        self.samples[spot] += 1

    def _sample(self, frame: FrameType) -> None:
        if not self._is_on or self._is_sampling:  # a signal that comes while a sample is filed would sample that
            return
        now_s = perf_counter()
        self._is_sampling = True
        try:
            spot = SampledLine(self._phase(), self._sites.of_frame(frame), self._sites.is_user_code(frame.f_code))
            if spot.phase == UNWATCHED:
                self.pending.append((spot, now_s - self._last_s))
            else:
                self._file(spot, now_s - self._last_s)
            if spot.site not in self.callers:
                self.callers[spot.site] = self._sites.chain(frame)[1:]
        except Exception as e:  # noqa: BLE001  # raised here it would come out of the user's line
            self._is_on = False
            self.failure = f"sampling of lines stopped early: {type(e).__name__}: {e}"
        finally:
            self._is_sampling = False
        self._last_s = perf_counter()  # what filing took is not the next line's
        self.own_s += self._last_s - now_s

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                self._sample(frame)
            del frame
