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

from flatout.core.errors import UsageError
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites
from flatout.tune.verify.expect.graphs import Graphs, GraphWatch
from flatout.tune.verify.expect.kernels import KernelLaunch
from flatout.tune.verify.expect.lines import LineMode
from flatout.tune.verify.expect.tape import Tape, TapeSegment
from flatout.tune.verify.expect.tape_annotations import (
    COMPILING,
    REGION,
    annotate,
    annotate_calls,
    annotate_generated_kernels,
    hide_from_dynamo,
)
from flatout.tune.verify.expect.waits import Wait


class Region:
    """A region from `enter` to `leave`. What it replaces for that time, it puts back, whatever is raised."""

    def __init__(self) -> None:
        self.sites = Sites()
        self.segments: list[TapeSegment] = []
        self.entering_s = 0.0
        self._patches = Patches()
        self._graphs: GraphWatch | None = None
        self._compiling = ExitStack()
        self._num_reads = self._num_on_other_threads = 0
        self._mode: LineMode | None = None
        self.reads: list[Wait] = []
        self.on_other_threads: list[KernelLaunch] = []
        self.devices: set[str] = set()

    def enter(self) -> None:
        """Begin. Raises UsageError when a profiler runs, or another thread is in a region."""
        start = perf_counter()
        _RECORDER.push(self)
        self._mode = _RECORDER.mode
        assert self._mode is not None
        self._num_reads, self._num_on_other_threads = len(self._mode.reads), len(self._mode.on_other_threads)
        annotate_generated_kernels(self._patches, self.sites)
        self._graphs = GraphWatch(self.sites, self._on_compiling)
        self._graphs.start(self._patches)
        self.entering_s = perf_counter() - start

    def leave(self) -> Callable[[Iterable[str]], Graphs]:
        """End the region and return a function from the compiled regions of the tape to what there was of torch.compile."""
        self.abandon()
        assert self._mode is not None and self._graphs is not None
        self.reads = self._mode.reads[self._num_reads :]
        self.on_other_threads = self._mode.on_other_threads[self._num_on_other_threads :]
        self.devices = self._mode.devices
        return self._graphs.read

    def abandon(self) -> None:
        """End the region without a result."""
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
            self._compiling.enter_context(annotate(COMPILING))
        else:
            self._compiling.close()
            annotate_generated_kernels(self._patches, self.sites)


class _RegionRecorder:
    """Starts the profiler at each border and stops it at the next."""

    def __init__(self) -> None:
        self.mode: LineMode | None = None
        self._open: list[Region] = []
        self._tape = Tape()
        self._annotations = ExitStack()
        self._patches = Patches()
        self._thread_id = 0

    def push(self, region: Region) -> None:
        """Begin a region inside those that are open."""
        if self._open and self._thread_id != threading.get_ident():
            raise UsageError(
                "another thread is inside an expectation, and torch has one profiler; put one around the work of both threads "
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
        """End a region, and go on with those around it."""
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
        annotate_calls(self._patches, sites)
        self.mode.watch_methods(self._patches)
        self.mode.watch_threads(self._patches)
        self.mode.enter()

    def _unwatch(self) -> None:
        mode, self.mode = self.mode, None
        self._patches.undo()
        if mode is not None:
            mode.leave()

    def _start(self) -> None:
        self._tape.start()
        self._annotations.enter_context(annotate(REGION))

    def _cut(self) -> None:
        self._annotations.close()
        segment = self._tape.stop()
        for region in self._open:
            region.segments.append(segment)


_RECORDER: Final = _RegionRecorder()
