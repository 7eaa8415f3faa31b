"""Lines that launched work on the device: a log of dispatched operators, matched with the profiler's calls by time.

The device's profiler records no Python lines, and intercepting operators makes the host late. So one step is profiled
undisturbed, for its times, and another with this log, for its lines; both launch the same kernels, matched by name and order.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from threading import get_native_id
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

import torch

from flatout.check.observe.operators.recorder import Interception, OperatorRecorder, is_composite, signature_of
from flatout.check.traces.activity import is_launch, plain_name
from flatout.check.traces.events import CallPlace, DeviceWork, HostCall
from flatout.check.traces.intervals import union_of_intervals
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites

_MOST: Final = 200_000
_ANY_THREAD: Final = "any"
_STRETCH: Final = 256
"""Launches that are moved together: some milliseconds, in which clocks drift by less than a microsecond."""
_FARTHEST_NS: Final = 200_000
_GRAIN_NS: Final = 1_000


class LaunchEntry(NamedTuple):
    """While this operator was dispatched, from `start_ns` to `end_ns` of perf_counter_ns on one thread, it was at this place."""

    start_ns: int
    end_ns: int
    thread: int
    place: CallPlace
    is_view: bool = False
    """An operator that gives the device nothing to do."""


class LaunchLog(Interception):
    """Logs every operator, and every explicit synchronisation, with its place while entered."""

    def __init__(self, sites: Sites, *, phase: Callable[[], str], module: Callable[[], str]) -> None:
        super().__init__()
        self.entries: list[LaunchEntry] = []
        self._sites = sites
        self._phase = phase
        self._places = OperatorRecorder(sites, phase=phase, module=module, is_device=True)
        self._patches = Patches()

    def enter(self) -> None:
        """Begin to log dispatched operators."""
        for owner in (torch.cuda, torch.cuda.Stream, torch.cuda.Event):
            self._watch(owner)
        super().enter()

    def leave(self) -> None:
        """Stop logging and put everything back."""
        super().leave()
        self._patches.undo()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if len(self.entries) >= _MOST:
            return func(*args, **(kwargs or {}))
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        site, _, phase = self._places.place_of(sys._getframe(1))
        start = perf_counter_ns()
        out = func(*args, **(kwargs or {}))
        name, is_view, _ = signature_of(func)
        place = CallPlace(site, phase, name)
        self.entries.append(LaunchEntry(start, perf_counter_ns(), get_native_id(), place, is_view))
        return out

    def _watch(self, owner: Any) -> None:
        original = owner.synchronize

        def synchronising(*args: Any, **kwargs: Any) -> Any:
            site = self._sites.of_frame(sys._getframe(1))
            start = perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                place = CallPlace(site, self._phase(), "synchronize")
                self.entries.append(LaunchEntry(start, perf_counter_ns(), get_native_id(), place))

        self._patches.set(owner, "synchronize", synchronising)


class PlaceLog:
    """A log indexed for look-ups of `calls`, which are on the trace's clock; `offset_ns` takes the log's clock there.

    The offset is known to some 20 us, and drifts: operators are shorter than that. But a launch lies within the operator that
    makes it, so stretch by stretch the log is moved to where most launches do.
    """

    def __init__(self, entries: Iterable[LaunchEntry], calls: Iterable[HostCall], *, offset_ns: int) -> None:
        self._by_thread: dict[int | str, list[LaunchEntry]] = defaultdict(list)
        for entry in sorted(entries):
            moved = entry._replace(start_ns=entry.start_ns + offset_ns, end_ns=entry.end_ns + offset_ns)
            self._by_thread[entry.thread].append(moved)
            # The profiler names threads by another number when it records the device alone. The threads that dispatch take turns
            # (the user's waits for the backward's), so the time alone is enough.
            self._by_thread[_ANY_THREAD].append(moved)
        self._starts = {thread: [e.start_ns for e in own] for thread, own in self._by_thread.items()}
        launches = sorted(c.start_ns for c in calls if "LaunchKernel" in c.name)
        work = union_of_intervals((e.start_ns, e.end_ns) for e in self._by_thread[_ANY_THREAD] if not e.is_view)
        stretches = [launches[i : i + _STRETCH] for i in range(0, len(launches), _STRETCH)]
        self._stretch_starts = [s[0] for s in stretches]
        self._shifts = [_best_shift(s, work) for s in stretches]

    def place_of(self, call: HostCall) -> CallPlace | None:
        """The place of the innermost operator during which the call ran; None outside all of them."""
        thread = call.thread if call.thread in self._by_thread else _ANY_THREAD
        own = self._by_thread.get(thread)
        if not own:
            return None
        stretch = bisect_right(self._stretch_starts, call.start_ns) - 1
        at_ns = call.start_ns - (self._shifts[max(0, stretch)] if self._shifts else 0)
        found = bisect_right(self._starts[thread], at_ns) - 1
        # Operators nest a few levels at most (a composite one and its parts): the innermost began last.
        for entry in reversed(own[max(0, found - 8) : found + 1]):
            if at_ns <= entry.end_ns:
                return entry.place
        return None


def _best_shift(launches: list[int], work: list[tuple[int, int]]) -> int:
    """How far (ns, at most 200 us) to move `work` so that most launches fall into it; of equals the middle of the nearest run."""
    if not work or not launches:
        return 0
    starts, ends = torch.tensor(work).unbind(1)
    shifts = torch.arange(-_FARTHEST_NS, _FARTHEST_NS + 1, _GRAIN_NS)
    at = torch.tensor(launches)[None] - shifts[:, None]
    index = torch.searchsorted(starts.contiguous(), at, right=True) - 1
    inside = ((index >= 0) & (at <= ends[index.clamp(min=0)])).sum(1)
    best = [int(s) for s in shifts[inside == inside.max()]]
    nearest = min(best, key=abs)
    run = [nearest]
    while run[-1] + _GRAIN_NS in best:
        run.append(run[-1] + _GRAIN_NS)
    while run[0] - _GRAIN_NS in best:
        run.insert(0, run[0] - _GRAIN_NS)
    return 0 if 0 in run else run[len(run) // 2]


def named_calls(calls: Iterable[HostCall], work: Iterable[DeviceWork]) -> dict[tuple[str, str], list[HostCall]]:
    """Launches and waits in order, by the call's name and the name of what was launched."""
    names = {w.correlation: w.name for w in work if w.correlation}
    groups: dict[tuple[str, str], list[HostCall]] = defaultdict(list)
    for call in sorted(calls):
        launched = names.get(call.correlation, "")
        if launched or not is_launch(call.name):
            groups[plain_name(call.name), launched].append(call)
    return groups


def carried_over(
    timed: dict[tuple[str, str], list[HostCall]],
    logged: dict[tuple[str, str], list[HostCall]],
    place_of: Callable[[HostCall], CallPlace | None],
) -> dict[HostCall, CallPlace]:
    """The place of each call of the timed step, from its like in the logged step: same names, same rank in their order.

    Where one step has more of a kind than the other, ranks are stretched: their order is the same, their number nearly so.
    """
    found: dict[HostCall, CallPlace] = {}
    for key, calls in timed.items():
        others = logged.get(key)
        if not others:
            continue
        for rank, call in enumerate(calls):
            place = place_of(others[rank * len(others) // len(calls)])
            if place is not None:
                found[call] = place
    return found
