"""One region under observation, and the one profiler that all regions of a process share.

Regions may lie in one another. torch has one profiler, so the tape is cut at each border: a region's takes are all stretches
between its own borders, those of regions inside it included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from time import perf_counter
from typing import Final

from flatout.errors import CaptureError, UsageError
from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites
from flatout.verification.promises.generated import GeneratedKernels
from flatout.verification.promises.graphs import Graphs, GraphWatch, frame_sites
from flatout.verification.promises.kernels import Launch, launches_of
from flatout.verification.promises.lines import Elsewhere, HostRead, LineMode
from flatout.verification.promises.marks import COMPILING, REGION, hide_from_dynamo, mark, mark_calls
from flatout.verification.promises.memory import Peak, allocations_of, peak_of
from flatout.verification.promises.tape import Placed, Take, Tape, placed, window_of
from flatout.verification.promises.threads import watch_threads
from flatout.verification.promises.waits import Wait, on_cpu, on_devices


class Observed:
    """All that was seen of one region."""

    def __init__(self, region: Region, graphs: Callable[[Iterable[str]], Graphs]) -> None:
        frames = frame_sites(region.sites)
        stretches = [(take, placed(take, frames)) for take in region.takes]
        self.graphs = graphs(spot.compiled for _, events in stretches for _, spot in events if spot.compiled)
        self.launches: list[Launch] = [launch for stretch in stretches for launch in launches_of(*stretch)]
        is_device = any(launch.ran == "kernel" for launch in self.launches)
        if not is_device:
            self.launches += [Launch(e.op, e.site, e.is_backward, "operator") for e in region.elsewhere]
        self.peak: Peak = peak_of(a for _, events in stretches for a in allocations_of(events))
        self.waits: list[Wait] = on_cpu(region.reads)
        if is_device or _uses_device(region):
            self.waits = [wait for stretch in stretches for wait in _waits_of(*stretch)]
        self.observing_s = 0.0
        if "cuda" in region.devices and not any(take.on_devices for take in region.takes):
            raise CaptureError(
                "the region used a CUDA device, and the profiler saw nothing of it: the driver does not let this process "
                "profile, or another profiler holds the device; allow it (NVreg_RestrictProfilingToAdminUsers=0), or end that one"
            )


def _uses_device(region: Region) -> bool:
    return bool(region.devices - {"cpu", "meta"}) or any(take.on_devices for take in region.takes)


def _waits_of(take: Take, events: Placed) -> list[Wait]:
    return on_devices(take.on_devices, {e.number: spot for e, spot in events}, window_of(take))


class Region:
    """A region from `enter` to `leave`. What it replaces for that time, it puts back, whatever is raised."""

    def __init__(self) -> None:
        self.sites = Sites()
        self.takes: list[Take] = []
        self._observing_s = 0.0
        self._patches = Patches()
        self._graphs: GraphWatch | None = None
        self._generated: GeneratedKernels | None = None
        self._compiling = ExitStack()
        self._num_reads = self._num_elsewhere = 0
        self._mode: LineMode | None = None
        self.reads: list[HostRead] = []
        self.elsewhere: list[Elsewhere] = []
        self.devices: set[str] = set()

    def enter(self) -> None:
        """Begin. Raises UsageError when a profiler runs, or another thread is in a region."""
        start = perf_counter()
        _RECORDER.push(self)
        self._mode = _RECORDER.mode
        assert self._mode is not None
        self._num_reads, self._num_elsewhere = len(self._mode.reads), len(self._mode.elsewhere)
        self._generated = GeneratedKernels(self._patches, self.sites)
        self._generated.look()
        self._graphs = GraphWatch(self.sites, self._on_compiling)
        self._graphs.start(self._patches)
        self._observing_s += perf_counter() - start

    def leave(self) -> Observed:
        """End, and tell what was seen."""
        start = perf_counter()
        self.abandon()
        assert self._mode is not None and self._graphs is not None
        self.reads = self._mode.reads[self._num_reads :]
        self.elsewhere = self._mode.elsewhere[self._num_elsewhere :]
        self.devices = self._mode.devices
        observed = Observed(self, self._graphs.read)
        observed.observing_s = self._observing_s + perf_counter() - start
        return observed

    def abandon(self) -> None:
        """End without telling."""
        self._compiling.close()
        try:
            _RECORDER.pop(self)
        finally:
            if self._graphs is not None:
                self._graphs.close()
            self._patches.undo()

    def _on_compiling(self, is_compiling: bool) -> None:
        """What a compiler runs is marked, and gets no lines."""
        mode = _RECORDER.mode
        if mode is not None:
            mode.is_paused = is_compiling
        if is_compiling:
            hide_from_dynamo()
            self._compiling.enter_context(mark(COMPILING))
        else:
            self._compiling.close()
            if self._generated is not None:
                self._generated.look()


class _Recorder:
    """Starts the profiler at each border and stops it at the next."""

    def __init__(self) -> None:
        self.mode: LineMode | None = None
        self._open: list[Region] = []
        self._tape = Tape()
        self._marks = ExitStack()
        self._patches = Patches()
        self._thread_id = 0

    def push(self, region: Region) -> None:
        """A region begins inside those that are open."""
        if self._open and self._thread_id != threading.get_ident():
            raise UsageError(
                "another thread is inside a guarantee, and torch has one profiler; put one guarantee around both threads' work "
                "(threads that start inside it count)"
            )
        if self._open:
            self._cut()
        else:
            self._thread_id = threading.get_ident()
        self._start()
        if not self._open:
            self._watch(region.sites)
        else:
            region.sites = self._open[0].sites
        self._open.append(region)

    def pop(self, region: Region) -> None:
        """A region ends."""
        if region not in self._open:
            return
        is_last = len(self._open) == 1
        if is_last:
            self._unwatch()
        self._cut()
        self._open.remove(region)
        if not is_last:
            self._start()

    def _watch(self, sites: Sites) -> None:
        hide_from_dynamo()
        self.mode = LineMode(sites)
        mark_calls(self._patches, sites)
        self.mode.watch_methods(self._patches)
        watch_threads(self._patches, self.mode)
        self.mode.enter()

    def _unwatch(self) -> None:
        mode, self.mode = self.mode, None
        self._patches.undo()
        if mode is not None:
            mode.leave()

    def _start(self) -> None:
        self._tape.start()
        self._marks.enter_context(mark(REGION))

    def _cut(self) -> None:
        self._marks.close()
        take = self._tape.stop()
        for region in self._open:
            region.takes.append(take)


_RECORDER: Final = _Recorder()
