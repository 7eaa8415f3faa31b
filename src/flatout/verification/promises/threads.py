"""Threads that a region starts take part in it: their operators count, though the profiler watches one thread alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from flatout.profiling.patching import Patches
from flatout.verification.promises.lines import LineMode


def watch_threads(patches: Patches, mode: LineMode) -> None:
    """Have threads that are started from now on run under `mode`, until it is over."""
    start: Callable[..., None] = threading.Thread.start

    def starting(thread: threading.Thread) -> None:
        run = thread.run

        def watched(*args: Any, **kwargs: Any) -> None:
            mode.started.add(threading.get_ident())
            with mode:
                run(*args, **kwargs)

        thread.run = watched  # type: ignore[method-assign]  # of this one thread
        start(thread)

    patches.set(threading.Thread, "start", starting)
