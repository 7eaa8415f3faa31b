"""While TorchScript reads or traces the user's functions, what flatout replaced is put back: it would compile our wrappers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.core.runtime.patches import Patches, all_suspended

_READERS: Final = ("script", "trace", "trace_module", "_get_trace_graph")
"""Functions of torch.jit that read or trace code; `SummaryWriter.add_graph` and exporters call them too."""

_FRAMES_UP: Final = 3
"""Position of the parameter `_frames_up` of torch.jit.script (torch 2.11 to 2.13)."""


class Scripting(Collector):
    """Suspends every watch for as long as one of TorchScript's compilers runs."""

    def install(self, patches: Patches) -> None:
        """Watch what reads or traces code."""
        for name in _READERS:
            patches.set(torch.jit, name, _unwatched(getattr(torch.jit, name)))


def _unwatched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reading(*args: Any, **kwargs: Any) -> Any:
        if original.__name__ == "script" and len(args) < _FRAMES_UP:  # it finds the caller's names so many frames up
            kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + 1
        with all_suspended():
            return original(*args, **kwargs)

    return reading


COLLECTOR: Final = CollectorEntry(lambda observation: Scripting())
