"""The data pipeline: what waits on it, and what its worker processes do."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import CodeType
from typing import Any, Final, Protocol

import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import ConcatDataset, DataLoader, StackDataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.profiling.lines.sampler import Sampler
from flatout.profiling.patching import Patches
from flatout.profiling.sites import Sites

_WORKER_FLUSH_S: Final = 0.5
_original_worker_loop: Callable[..., None] = torch_worker._worker_loop


class LoaderListener(Protocol):
    """Who is told when the loop waits for data."""

    def on_epoch_start(self) -> None: ...

    def on_fetch_start(self) -> None: ...

    def on_fetch_end(self, batch: Any) -> None: ...

    def fail(self, error: Exception) -> None: ...


class LoaderUse:
    """One DataLoader that was iterated over from one line."""

    def __init__(self, iterator: Any, site: int, sites: Sites) -> None:
        self.site = site
        self.constructed = -1
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
        """For each epoch that was watched: making its iterator, its first batch, and ending it."""


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


class Feeding:
    """Watches `next()` of every DataLoader iterator on the observed thread."""

    def __init__(self, sites: Sites, listener: LoaderListener) -> None:
        self.loaders: dict[tuple[int, int], LoaderUse] = {}
        self.epochs: Counter[int] = Counter()
        """Iterators made, by the identity of the data set, in steps that went by unwatched too."""
        self.is_active = False
        self.weight = 1
        self.is_paused = False
        self._sites = sites
        self._listener = listener
        self._thread_id = get_ident()
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-workers-")
        self._constructed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._loader_sites: dict[int, int] = {}
        self._made_s: dict[int, float] = {}
        """Seconds that making an iterator took, by its identity, until its first batch is fetched."""

    def install(self, patches: Patches) -> None:
        """Replace the iterators' `__next__` and the workers' main loop."""
        original, make, init = _BaseDataLoaderIter.__next__, DataLoader.__iter__, DataLoader.__init__
        watch = self

        def __next__(self: Any) -> Any:
            if not watch.is_active or get_ident() != watch._thread_id:
                return original(self)
            return watch._next(original, self)

        def __iter__(self: Any) -> Any:
            return watch._make(make, self) if get_ident() == watch._thread_id else make(self)

        patches.set(_BaseDataLoaderIter, "__next__", __next__)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if get_ident() == watch._thread_id and not watch.is_paused:
                watch._constructed[self] = watch._sites.of_frame(sys._getframe(1))

        patches.set(DataLoader, "__iter__", __iter__)
        patches.set(DataLoader, "__init__", __init__)
        os.environ[ObservedWorker.FOLDER] = self._folder.name
        patches.set(torch_worker, "_worker_loop", ObservedWorker.loop)

    def close(self) -> None:
        """Remove what the workers wrote."""
        os.environ.pop(ObservedWorker.FOLDER, None)
        self._folder.cleanup()

    def worker_samples(self) -> list[tuple[str, int, str, float, int]]:
        """(file, line, function, seconds, samples) from all workers together."""
        total: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for path in Path(self._folder.name).glob("*.json"):
            for file, line, function, seconds, count in json.loads(path.read_text()):
                total[file, line, function][0] += seconds
                total[file, line, function][1] += count
        return [(*key, seconds, int(count)) for key, (seconds, count) in total.items()]

    def _make(self, original: Callable[[Any], Any], loader: Any) -> Any:
        if self.is_paused:
            return original(loader)
        self.epochs[id(loader.dataset)] += 1
        self._loader_sites[id(loader.dataset)] = self._constructed.get(loader, -1)
        self._listener.on_epoch_start()
        if not self.is_active:
            return original(loader)
        self._listener.on_fetch_start()
        start = perf_counter()
        try:
            iterator = original(loader)
            self._made_s[id(iterator)] = perf_counter() - start
            return iterator
        finally:
            self._listener.on_fetch_end(None)

    def _next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        use = self._use_of(iterator)
        made_s = self._made_s.pop(id(iterator), None)
        self._listener.on_fetch_start()
        start = perf_counter()
        batch = None
        is_last = True
        try:
            batch = original(iterator)
            is_last = False
            use.num_batches += 1
            use.weighted_fetches += self.weight
            return batch
        finally:
            seconds = perf_counter() - start
            if made_s is not None:
                use.first_waits_s.append(made_s + seconds)
            elif is_last and use.first_waits_s:
                use.first_waits_s[-1] += seconds
            else:
                use.wait_s += seconds
                use.fetches += 1
            self._listener.on_fetch_end(batch)

    def _use_of(self, iterator: Any) -> LoaderUse:
        site = self._sites.of_frame(sys._getframe(3))
        key = (id(iterator._dataset), site)
        use = self.loaders.get(key)
        if use is None:
            use = self.loaders[key] = LoaderUse(iterator, site, self._sites)
            use.constructed = self._loader_sites.get(id(iterator._dataset), -1)
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
