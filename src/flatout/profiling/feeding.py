"""The data pipeline: what waits on it, and what its worker processes do."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from time import perf_counter
from types import CodeType
from typing import Any, Final, Protocol

import torch.utils.data._utils.collate as torch_collate
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.profiling.patching import Patches
from flatout.profiling.sampler import Sampler
from flatout.profiling.sites import Sites

_WORKER_FLUSH_S: Final = 0.5
_original_worker_loop: Callable[..., None] = torch_worker._worker_loop


class LoaderListener(Protocol):
    """Who is told when the loop waits for data."""

    def on_fetch_start(self) -> None: ...

    def on_fetch_end(self, batch: Any) -> None: ...

    def fail(self, error: Exception) -> None: ...


class LoaderUse:
    """One DataLoader that was iterated over from one line."""

    def __init__(self, iterator: Any, site: int, sites: Sites) -> None:
        self.site = site
        self.dataset = iterator._dataset
        self.collate = iterator._collate_fn
        self.num_workers = int(iterator._num_workers)
        sampler = getattr(iterator, "_index_sampler", None)
        self.batch_size = int(getattr(sampler, "batch_size", 0) or 0)
        self.is_map_style = hasattr(type(self.dataset), "__getitem__") and iterator._dataset_kind == 0
        self.has_own_collate = self.collate not in (torch_collate.default_collate, torch_collate.default_convert)
        fetch = getattr(type(self.dataset), "__getitems__", None) or getattr(type(self.dataset), "__getitem__", None)
        self.getitem_site = _first_line(fetch, sites)
        self.collate_site = _first_line(self.collate, sites)
        self.fetches = 0
        self.weighted_fetches = 0
        self.wait_s = 0.0


def _first_line(function: object, sites: Sites) -> int:
    code = getattr(function, "__code__", None)
    return sites.of_code(code) if isinstance(code, CodeType) else -1


class Feeding:
    """Watches `next()` of every DataLoader iterator on the observed thread."""

    def __init__(self, sites: Sites, listener: LoaderListener) -> None:
        self.loaders: dict[tuple[int, int], LoaderUse] = {}
        self.is_active = False
        self.weight = 1
        self._sites = sites
        self._listener = listener
        self._thread_id = get_ident()
        self._folder = tempfile.TemporaryDirectory(prefix="flatout-workers-")

    def install(self, patches: Patches) -> None:
        """Replace the iterators' `__next__` and the workers' main loop."""
        original = _BaseDataLoaderIter.__next__
        watch = self

        def __next__(self: Any) -> Any:
            if not watch.is_active or get_ident() != watch._thread_id:
                return original(self)
            return watch._next(original, self)

        patches.set(_BaseDataLoaderIter, "__next__", __next__)
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

    def _next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        use = self._use_of(iterator)
        self._listener.on_fetch_start()
        start = perf_counter()
        batch = None
        try:
            batch = original(iterator)
            use.fetches += 1
            use.weighted_fetches += self.weight
            return batch
        finally:
            use.wait_s += perf_counter() - start
            self._listener.on_fetch_end(batch)

    def _use_of(self, iterator: Any) -> LoaderUse:
        site = self._sites.of_frame(sys._getframe(3))
        key = (id(iterator._dataset), site)
        use = self.loaders.get(key)
        if use is None:
            use = self.loaders[key] = LoaderUse(iterator, site, self._sites)
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
