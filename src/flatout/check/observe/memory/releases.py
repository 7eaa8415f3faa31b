"""Calls that give memory back by hand: gc.collect and torch.cuda.empty_cache, with their lines and seconds."""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from flatout.core.records.usage import CallUse
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites


class Releases:
    """Wraps both functions for the whole observation; they are rare and slow, so that a clock around them costs nothing."""

    def __init__(self, sites: Sites, thread_id: int) -> None:
        self._seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._sites = sites
        self._thread_id = thread_id

    def install(self, patches: Patches) -> None:
        """Replace gc.collect and torch.cuda.empty_cache by timed ones."""
        patches.set(gc, "collect", self._timing(gc.collect, "gc.collect"))
        clear = self._timing(torch.cuda.empty_cache, "torch.cuda.empty_cache")
        patches.set(torch.cuda.memory, "empty_cache", clear)
        patches.set(torch.cuda, "empty_cache", clear)

    def clear(self) -> None:
        """Forget what was before the first step."""
        self._seconds.clear()

    def uses(self, num_steps: int) -> tuple[CallUse, ...]:
        """Rows by name and line, for one of `num_steps` steps."""
        steps = max(1, num_steps)
        return tuple(
            CallUse(name=name, source=site, calls=len(times) / steps, seconds=median(times) * len(times) / steps)
            for (name, site), times in self._seconds.items()
            if site >= 0
        )

    def _timing(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if get_ident() != self._thread_id:
                return original(*args, **kwargs)
            start = perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds = perf_counter() - start
                self._seconds[name, self._sites.of_frame(sys._getframe(1))].append(seconds)

        return timed
