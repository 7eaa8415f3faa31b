"""A thread that looks many times a second at the line the main thread is on.

Its price is one glance at the interpreter's frames per sample (0.3 us) and the thread switch; measured and reported.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from flatout.profiling.sites import Sites

RATE_HZ = 50.0
SWITCH_S = 0.0005
"""The interpreter's switch interval while sampling. A thread that wants the interpreter gets it when the other one calls into
C or, in pure Python, after this interval: with the default of 5 ms most samples of a shorter Python loop would fall on the
next torch call instead."""


class Sampler:
    """Counts (phase, user line, is the user's own frame innermost) of one thread while it is on."""

    def __init__(self, sites: Sites, *, thread_id: int, phase: Callable[[], str], rate_hz: float = RATE_HZ) -> None:
        self.counts: Counter[tuple[str, int, bool]] = Counter()
        self.cpu_s = 0.0
        self.is_on = False
        self._sites = sites
        self._thread_id = thread_id
        self._phase = phase
        self._period_s = 1.0 / rate_hz
        self._switch_s = sys.getswitchinterval()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flatout-sampler", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        self.is_on = True
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        sys.setswitchinterval(self._switch_s)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            if not self.is_on:
                continue
            frame = sys._current_frames().get(self._thread_id)
            if frame is not None:
                own = self._sites.is_user_code(frame.f_code)
                self.counts[self._phase(), self._sites.of_frame(frame), own] += 1
            del frame
            self.cpu_s = time.thread_time()
