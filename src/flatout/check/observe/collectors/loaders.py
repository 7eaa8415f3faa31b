"""The data pipeline: what waits on it, and what its worker processes do."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import CodeType
from typing import Any, Final, NamedTuple

import msgspec
import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.lines.sampler import Sampler
from flatout.check.observe.observation import ObservationState
from flatout.core.records.evidence import Evidence, LineTime, Loader
from flatout.core.records.workload import Source
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites

_WORKER_FLUSH_S: Final = 0.5
_original_worker_loop: Callable[..., None] = torch_worker._worker_loop


class LoaderStart(NamedTuple):
    """What iterators have in common that a loader starts over and over, also where the script makes it anew for each epoch."""

    dataset: int
    """The data set's identity."""
    constructed: int
    num_workers: int
    site: int
    """The line that asks for the iterator."""


class LoaderUse:
    """One DataLoader that was iterated over from one line."""

    def __init__(self, iterator: Any, site: int, sites: Sites) -> None:
        self.site = site
        self.constructed = -1
        self.taken_from = -1
        self.starts: set[LoaderStart] = set()
        """What its iterators were created as."""
        self.dataset = iterator._dataset
        self.collate = iterator._collate_fn
        self.collates = bool(iterator._auto_collation)
        """Whether the loader asks for single items and puts them together; else it asks with what its sampler gives."""
        self.num_workers = int(iterator._num_workers)
        sampler = getattr(iterator, "_index_sampler", None)
        self.batch_size = int(getattr(sampler, "batch_size", 0) or 0)
        self.is_map_style = hasattr(type(self.dataset), "__getitem__") and iterator._dataset_kind == 0
        self.has_own_collate = self.collate not in (torch_collate.default_collate, torch_collate.default_convert)
        fetch = getattr(type(self.dataset), "__getitems__", None) or getattr(type(self.dataset), "__getitem__", None)
        self.getitem_site = _first_line(fetch, sites)
        self.collate_site = _first_line(self.collate, sites)
        self.pin_memory = bool(getattr(iterator, "_pin_memory", False))
        self.persistent_workers = bool(getattr(iterator, "_persistent_workers", False))
        self.prefetch_factor = int(getattr(iterator, "_prefetch_factor", 0) or 0) if self.num_workers else 0
        self.is_in_ram = is_in_ram(self.dataset)
        self.sampler = type(getattr(sampler, "sampler", sampler)).__name__
        self.context = getattr(iterator, "_multiprocessing_context", None)
        self.fetches = 0
        self.weighted_fetches = 0
        self.wait_s = 0.0
        self.num_batches = 0
        self.first_waits_s: list[float] = []
        """For each epoch that was watched: creating its iterator, its first batch, and ending it."""


def is_in_ram(dataset: object) -> bool:
    """Whether items are rows of tensors that lie in memory: torch's TensorDataset, also inside torch's own wrappers."""
    if isinstance(dataset, Subset):
        return is_in_ram(dataset.dataset)
    if isinstance(dataset, (ConcatDataset, StackDataset)):
        parts = dataset.datasets
        return all(map(is_in_ram, parts.values() if isinstance(parts, dict) else parts))
    return isinstance(dataset, TensorDataset)


def _first_line(function: object, sites: Sites) -> int:
    code = getattr(function, "__code__", None)
    return sites.of_code(code) if isinstance(code, CodeType) else -1


class LoaderWatch(Collector):
    """Watches `next()` of every DataLoader iterator on the observed thread."""

    def __init__(self, observation: ObservationState) -> None:
        self.loaders: dict[tuple[int, int, int, int], LoaderUse] = {}
        """By data set, line of construction, number of workers, and the line that fetches."""
        self.starts: Counter[LoaderStart] = Counter()
        """Iterators created, in steps that went by unwatched too."""
        self._is_paused = False
        self._observation = observation
        self._calls = observation.calls
        self._sites = observation.sites
        self._listener = observation.listener
        self._thread_id = observation.thread_id
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """Where workers write, from `install` to `close`."""
        self._constructed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._first_over: dict[int, tuple[weakref.ref[Any], int]] = {}
        """By its identity, each data set and the line that constructed the first loader over it."""
        self._started: weakref.WeakKeyDictionary[Any, LoaderStart] = weakref.WeakKeyDictionary()
        """What each iterator was created as."""
        self._created_s: dict[int, float] = {}
        """Seconds that creating an iterator took, by its identity, until its first batch is fetched."""

    def install(self, patches: Patches) -> None:
        """Replace the iterators' `__next__` and the workers' main loop."""
        original, make, init = _BaseDataLoaderIter.__next__, DataLoader.__iter__, DataLoader.__init__
        watch = self

        def __next__(self: Any) -> Any:
            if not watch._calls.is_active or get_ident() != watch._thread_id:
                return original(self)
            return watch._next(original, self)

        def __iter__(self: Any) -> Any:
            return watch._make(make, self) if get_ident() == watch._thread_id else make(self)

        patches.set(_BaseDataLoaderIter, "__next__", __next__)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if get_ident() == watch._thread_id and not watch._is_paused:
                site = watch._constructed[self] = watch._sites.of_frame(sys._getframe(1))
                watch._note_first(self.dataset, site)

        patches.set(DataLoader, "__iter__", __iter__)
        patches.set(DataLoader, "__init__", __init__)
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-workers-")
        os.environ[ObservedWorker.FOLDER] = self._folder.name
        patches.set(torch_worker, "_worker_loop", ObservedWorker.loop)

    def _note_first(self, dataset: Any, site: int) -> None:
        known = self._first_over.get(id(dataset))
        if known is None or known[0]() is not dataset:
            with suppress(TypeError):  # a list has no weak references
                self._first_over[id(dataset)] = (weakref.ref(dataset), site)

    def _taken_from(self, dataset: Any, constructed: int) -> int:
        """The line of the first loader over a data set, if that is another than the one that is read; else -1."""
        known = self._first_over.get(id(dataset))
        is_other = known is not None and known[0]() is dataset and known[1] != constructed
        return known[1] if known is not None and is_other else -1

    def close(self) -> None:
        """Remove what the workers wrote."""
        os.environ.pop(ObservedWorker.FOLDER, None)
        if self._folder is not None:
            self._folder.cleanup()

    def pause(self) -> None:
        """Loaders of trials are not the script's."""
        self._is_paused = True

    def resume(self) -> None:
        """Watch again what the script does."""
        self._is_paused = False

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `loaders`, and to `lines` those of the worker processes."""
        lines = sorted((*evidence.lines, *self._worker_lines()), key=lambda r: -r.seconds)
        return msgspec.structs.replace(evidence, loaders=self._rows(), lines=tuple(lines))

    def _rows(self) -> tuple[Loader, ...]:
        steps = max(1, sum(s.weight for s in self._observation.timeline.steps))
        num_steps = max(1, self._observation.num_steps)
        read = {u.constructed for u in self.loaders.values()}
        return tuple(
            Loader(
                source=u.site,
                getitem=u.getitem_site,
                collate=u.collate_site,
                dataset=type(u.dataset).__name__,
                num_workers=u.num_workers,
                batch_size=u.batch_size,
                wait_s=u.wait_s / max(1, u.fetches),
                fetches=u.weighted_fetches / steps,
                is_map_style=u.is_map_style,
                has_own_collate=u.has_own_collate,
                pin_memory=u.pin_memory,
                persistent_workers=u.persistent_workers,
                prefetch_factor=u.prefetch_factor,
                num_epochs=max(0, sum(self.starts[s] for s in u.starts) - 1) / num_steps,
                first_wait_s=statistics.fmean(u.first_waits_s) if u.first_waits_s else 0.0,
                is_in_ram=u.is_in_ram,
                sampler=u.sampler,
                constructed=u.constructed,
                taken_from=-1 if u.taken_from in read else u.taken_from,
            )
            for u in self.loaders.values()
        )

    def _worker_lines(self) -> Iterator[LineTime]:
        """The lines that were sampled in the workers, all of them together."""
        total: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for path in Path(self._folder.name).glob("*.json") if self._folder is not None else ():
            for file, line, function, seconds, count in json.loads(path.read_text()):
                total[file, line, function][0] += seconds
                total[file, line, function][1] += count
        for (file, line, function), (seconds, count) in total.items():
            site = self._sites.add(Source(file=file, line=line, function=function))
            a_step_s = seconds / max(1, self._observation.num_steps)
            yield LineTime(source=site, phase="data", seconds=a_step_s, num_samples=int(count), process="worker")

    def _make(self, original: Callable[[Any], Any], loader: Any) -> Any:
        if self._is_paused:
            return original(loader)
        site = self._sites.of_frame(sys._getframe(1))
        began = LoaderStart(id(loader.dataset), self._constructed.get(loader, -1), int(loader.num_workers), site)
        self.starts[began] += 1
        self._listener.on_epoch_start()
        if not self._calls.is_active:
            iterator = original(loader)
            self._started[iterator] = began
            return iterator
        self._listener.on_fetch_start()
        start = perf_counter()
        try:
            iterator = original(loader)
            self._started[iterator] = began
            self._created_s[id(iterator)] = perf_counter() - start
            return iterator
        finally:
            self._listener.on_fetch_end(None)

    def _next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        use = self._use_of(iterator)
        created_s = self._created_s.pop(id(iterator), None)
        is_outermost = not self._calls.is_fetching  # a loader may feed another
        if is_outermost:
            self._listener.on_fetch_start()
            self._calls.is_fetching = True
        start = perf_counter()
        batch = None
        is_last = True
        try:
            batch = original(iterator)
            is_last = False
            use.num_batches += 1
            use.weighted_fetches += self._calls.weight
            return batch
        finally:
            seconds = perf_counter() - start
            if created_s is not None:
                use.first_waits_s.append(created_s + seconds)
            elif is_last and use.first_waits_s:
                use.first_waits_s[-1] += seconds
            else:
                use.wait_s += seconds
                use.fetches += 1
            if is_outermost:
                self._calls.is_fetching = False
                self._listener.on_fetch_end(batch)

    def _use_of(self, iterator: Any) -> LoaderUse:
        site = self._sites.of_frame(sys._getframe(3))
        began = self._started.get(iterator)
        constructed = began.constructed if began is not None else -1
        key = (id(iterator._dataset), constructed, int(iterator._num_workers), site)
        use = self.loaders.get(key)
        if use is None:
            use = self.loaders[key] = LoaderUse(iterator, site, self._sites)
            use.constructed, use.taken_from = constructed, self._taken_from(iterator._dataset, constructed)
        if began is not None:
            use.starts.add(began)
        return use


class ObservedWorker:
    """The loop of a DataLoader worker process with a line sampler in it.

    A class with a static method at module level, so that spawned workers can import it.
    """

    FOLDER: Final = "FLATOUT_WORKER_FOLDER"

    @staticmethod
    def loop(*args: Any, **kwargs: Any) -> None:
        """Run torch's worker loop; every half second and at the end write what was sampled."""
        folder = os.environ.get(ObservedWorker.FOLDER)
        if folder is None or not os.path.isdir(folder):
            return _original_worker_loop(*args, **kwargs)
        sites = Sites()
        sampler = Sampler(sites, phase=lambda: "data")
        stop = threading.Event()
        path = Path(folder) / f"{os.getpid()}.json"
        thread = threading.Thread(target=_keep, args=(sampler, sites, stop, path), daemon=True)
        sampler.start()
        sampler.is_on = True
        thread.start()
        try:
            return _original_worker_loop(*args, **kwargs)
        finally:
            sampler.stop()
            stop.set()
            thread.join(timeout=1.0)


def _keep(sampler: Sampler, sites: Sites, stop: threading.Event, path: Path) -> None:
    """Write the samples now and then: a worker is often killed rather than asked to end."""
    while not stop.wait(_WORKER_FLUSH_S):
        _flush(sampler, sites, path)
    _flush(sampler, sites, path)


def _flush(sampler: Sampler, sites: Sites, path: Path) -> None:
    sources = sites.table()
    rows = [
        [sources[spot.site].file, sources[spot.site].line, sources[spot.site].function, seconds, sampler.samples[spot]]
        for spot, seconds in list(sampler.seconds.items())
        if spot.site >= 0
    ]
    beside = path.with_suffix(".part")
    try:
        beside.write_text(json.dumps(rows))
        os.replace(beside, path)
    except OSError:  # the observation is over and its folder is gone
        pass


COLLECTOR: Final = CollectorEntry(LoaderWatch)
