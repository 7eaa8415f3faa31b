"""Pages that the system gives the process afresh in every step: what malloc handed back is faulted in and zeroed again."""

from __future__ import annotations

from collections import Counter
from typing import Final, NamedTuple

import msgspec

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.operators.recorder import OperatorCall, OperatorListener
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import FreshPages, PagesOfLine

try:
    import resource
except ImportError:  # no such accounting on this system
    resource = None  # type: ignore[assignment]

_THREAD: Final = getattr(resource, "RUSAGE_THREAD", None)
_FEWEST_PAGES: Final = 4
"""Fewer pages between two operators are Python's own objects, not tensors."""
_MOST_LINES: Final = 8


class Usage(NamedTuple):
    """What the kernel has counted for the calling thread so far: page faults served without reading, seconds in the kernel."""

    faults: int
    kernel_s: float


def usage() -> Usage | None:
    """The calling thread's counts; None where the system keeps none for a thread."""
    if _THREAD is None:
        return None
    counts = resource.getrusage(_THREAD)
    return Usage(counts.ru_minflt, counts.ru_stime)


class PageFaults(Collector, OperatorListener):
    """Counts over series of light steps, and by line in deep steps."""

    def __init__(self, observation: ObservationState) -> None:
        self._observation = observation
        self._began: tuple[Usage, int] | None = None
        self._last: int | None = None
        self._by_site: Counter[int] = Counter()
        self._faults = 0
        self._kernel_s = 0.0
        self._num_steps = 0

    def restart(self) -> None:
        """Forget all: the steps begin anew."""
        self._began = self._last = None
        self._by_site.clear()
        self._faults = self._num_steps = 0
        self._kernel_s = 0.0

    def begin(self, mode: Mode) -> None:
        """A deep step begins: the pages since the last one belong to no operator."""
        self._last = None

    def begin_light(self) -> None:
        """Read the counts before the first of the steps."""
        now = usage()
        self._began = (now, self._observation.num_steps) if now is not None else None

    def end_light(self) -> None:
        """Add what was counted since."""
        now = usage()
        if self._began is not None and now is not None:
            before, first = self._began
            self._faults += now.faults - before.faults
            self._kernel_s += now.kernel_s - before.kernel_s
            self._num_steps += self._observation.num_steps - first
        self._began = None

    def on_operator(self, call: OperatorCall) -> None:
        """Count the pages since the operator before: they are this one's own."""
        now = usage()
        if now is None:
            return
        if self._last is not None and (pages := now.faults - self._last) >= _FEWEST_PAGES:
            self._by_site[call.key.site] += pages
        self._last = now.faults

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `fresh_pages`: pages and seconds a step."""
        if not self._num_steps:
            return evidence
        num_deep = len(self._observation.deep.steps)
        lines = self._by_site.most_common(_MOST_LINES) if num_deep else []
        pages = FreshPages(
            faults=self._faults / self._num_steps,
            kernel_s=self._kernel_s / self._num_steps,
            num_steps=self._num_steps,
            lines=tuple(PagesOfLine(source=s, faults=n / num_deep) for s, n in lines if s >= 0),
        )
        return msgspec.structs.replace(evidence, fresh_pages=pages)


COLLECTOR: Final = CollectorEntry(PageFaults)
