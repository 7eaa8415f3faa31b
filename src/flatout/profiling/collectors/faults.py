"""Pages that the system gives the process afresh in every step: what malloc handed back is faulted in and zeroed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from flatout.profiling.operators.recorder import OperatorKey
from flatout.records.memory import FreshPages, PagesOfLine

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


class Faults:
    """Counts over stretches of light steps, and by line in deep steps."""

    def __init__(self) -> None:
        self._began: tuple[Usage, int] | None = None
        self._last: int | None = None
        self._by_site: Counter[int] = Counter()
        self._faults = 0
        self._kernel_s = 0.0
        self._num_steps = 0

    def clear(self) -> None:
        """Forget all: the steps begin anew."""
        self._began = self._last = None
        self._by_site.clear()
        self._faults = self._num_steps = 0
        self._kernel_s = 0.0

    def begin_deep(self) -> None:
        """A deep step begins: the pages since the last one belong to no operator."""
        self._last = None

    def begin(self, *, seen: int) -> None:
        """A stretch of light steps begins."""
        now = usage()
        self._began = (now, seen) if now is not None else None

    def end(self, *, seen: int) -> None:
        """The stretch is over."""
        now = usage()
        if self._began is not None and now is not None:
            before, first = self._began
            self._faults += now.faults - before.faults
            self._kernel_s += now.kernel_s - before.kernel_s
            self._num_steps += seen - first
        self._began = None

    def inspect(
        self,
        func: Any,
        key: OperatorKey,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        producers: tuple[int, ...],
    ) -> None:
        """An operator of a deep step has run: the pages since the one before are its own."""
        now = usage()
        if now is None:
            return
        if self._last is not None and (pages := now.faults - self._last) >= _FEWEST_PAGES:
            self._by_site[key.site] += pages
        self._last = now.faults

    def evidence(self, num_deep: int) -> FreshPages | None:
        """Pages and seconds a step; None where nothing was counted."""
        if not self._num_steps:
            return None
        lines = self._by_site.most_common(_MOST_LINES) if num_deep else []
        return FreshPages(
            faults=self._faults / self._num_steps,
            kernel_s=self._kernel_s / self._num_steps,
            num_steps=self._num_steps,
            lines=tuple(PagesOfLine(source=s, faults=n / num_deep) for s, n in lines if s >= 0),
        )
