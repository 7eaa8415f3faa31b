"""What fully sharded parameters make the work on a device wait for: gathered weights, and gradients in flight.

FSDP2 runs its collectives on streams of their own; the compute stream waits for them by events. The time that it stands still is
what is exposed, so two events go around each such wait.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from flatout.check.observe.accelerator import uses_cuda
from flatout.check.observe.ranks.collectives import Collectives, recorded_event
from flatout.core.runtime.patches import Patches

_METHODS: Final = {
    "wait_for_unshard": "fsdp.all_gather",
    "post_backward": "fsdp.reduce_scatter",
    "finalize_backward": "fsdp.reduce_scatter",
    "_wait_for_post_backward": "fsdp.reduce_scatter",
}
"""Of FSDPParamGroup (torch.distributed.fsdp._fully_shard._fsdp_param_group): where the compute stream waits, and for what."""


class StreamStalls:
    """Watches the waits of the compute stream inside FSDP2."""

    def __init__(self, collectives: Collectives) -> None:
        self.is_active = False
        self._collectives = collectives
        self._now = threading.local()

    def install(self, patches: Patches) -> None:
        """Wrap FSDP2's waits and `Stream.wait_event`; nothing where this torch has no FSDP2."""
        try:
            from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
        except ImportError:
            return
        for name, op in _METHODS.items():
            if hasattr(FSDPParamGroup, name):
                patches.set(FSDPParamGroup, name, self._within(op, getattr(FSDPParamGroup, name)))
        patches.set(torch.cuda.Stream, "wait_event", self._timing(torch.cuda.Stream.wait_event))

    def _within(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            if not self.is_active or not uses_cuda():
                return original(*args, **kwargs)
            before = getattr(self._now, "op", None)
            self._now.op, self._now.stream, self._now.frame = op, torch.cuda.current_stream(), sys._getframe(1)
            try:
                return original(*args, **kwargs)
            finally:
                self._now.op, self._now.frame = before, None

        return method

    def _timing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait_event(stream: Any, event: Any) -> Any:
            op = getattr(self._now, "op", None)
            if op is None or not self.is_active or stream != self._now.stream:
                return original(stream, event)
            key = self._collectives.key_of(op, self._now.frame, None, "torch.distributed.fsdp")
            totals = self._collectives.totals(key)
            totals.num += 1
            start = recorded_event(stream)
            result = original(stream, event)
            # No size is known here: a wait carries nothing, the call that it waits for does.
            self._collectives.add_stall(totals, start, recorded_event(stream), 1 << 40)
            return result

        return wait_event
