"""Every collective of torch.distributed by the user's line: how often, how much, and how long this rank waited for it.

On a CPU (gloo) a collective is exposed while the host sits in the call, or in the wait of an asynchronous one. On a device the
host goes on at once; there two events on the stream around the call, or around the wait, measure how long the stream stood still.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from time import perf_counter
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flatout.check.observe.accelerator import uses_cuda
from flatout.core.errors import CaptureError
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites
from flatout.core.tensors.nests import tensors_in

SMALL_BYTES: Final = 16 << 10
"""A call that carries no more than this is all latency: 16 KiB take some 20 us on the slowest link in use (1 GB/s)."""

_FUNCTIONS: Final = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_single", "_all_gather_base",
    "all_gather_coalesced", "all_gather_object", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
    "_reduce_scatter_base", "broadcast", "broadcast_object_list", "barrier", "monitored_barrier", "all_to_all",
    "all_to_all_single", "reduce", "gather", "gather_object", "scatter", "scatter_object_list", "send", "recv", "isend",
    "irecv", "batch_isend_irecv", "_broadcast_coalesced",
)  # fmt: skip
"""Of distributed_c10d; those that this torch has."""
_FUNCTIONAL: Final = (
    "wait_tensor", "broadcast", "all_reduce", "all_gather_single", "all_gather_tensor", "all_gather_tensor_autograd",
    "reduce_scatter_single", "reduce_scatter_tensor", "reduce_scatter_tensor_autograd", "all_reduce_coalesced",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "all_to_all_single",
    "all_to_all_single_autograd", "permute_tensor",
)  # fmt: skip
"""Of _functional_collectives, which DTensor and tensor parallelism call."""


class CollectiveKey(NamedTuple):
    """What makes two calls the same row."""

    op: str
    site: int
    phase: str
    backend: str
    group_size: int
    caller: str


class Totals:
    """The calls of one key in one step. `num_open` of them have exposed times that are not known yet."""

    def __init__(self) -> None:
        self.num = 0
        self.bytes = 0
        self.seconds = 0.0
        self.exposed_s = 0.0
        self.small_s: list[float] = []
        self.num_open = 0
        self.is_unknown = False

    def add(self, seconds: float, exposed_s: float, num_bytes: int) -> None:
        """Count the time of one call."""
        self.seconds += seconds
        self.exposed_s += exposed_s
        if num_bytes <= SMALL_BYTES:
            self.small_s.append(exposed_s)


class Open(NamedTuple):
    """An asynchronous collective that has not finished."""

    totals: Totals
    start_s: float
    bytes: int
    on_device: bool


class Stall(NamedTuple):
    """Two events on a stream: what lies between them is exposed time of these calls."""

    totals: Totals
    start: torch.cuda.Event
    end: torch.cuda.Event
    bytes: int


class Collectives:
    """Wraps the collectives from `install` until the patches are undone; `step` holds those of the step in progress.

    While `is_fenced` a collective raises CaptureError and sends nothing: trials run on one rank alone.
    """

    def __init__(
        self,
        sites: Sites,
        *,
        phase: Callable[[], str],
        backward_site: Callable[[], int],
        after_call: Callable[[], None],
    ) -> None:
        """`after_call` is called when a collective returned: what it took is nobody's Python time."""
        self.step: dict[CollectiveKey, Totals] = {}
        self.is_active = False
        self.is_fenced = False
        self._after_call = after_call
        self._sites = sites
        self._phase = phase
        self._backward_site = backward_site
        self._inside = threading.local()
        self._open: weakref.WeakKeyDictionary[Any, Open] = weakref.WeakKeyDictionary()
        self._stalls: list[Stall] = []

    def install(self, patches: Patches) -> None:
        """Wrap torch.distributed's functions, the functional collectives, and `Work.wait`."""
        from torch.distributed import _functional_collectives

        for name in _FUNCTIONS:
            original = getattr(distributed_c10d, name, None)
            if original is None:
                continue
            wrapped = self._wrap(name, original)
            for owner in (distributed_c10d, dist):
                if getattr(owner, name, None) is original:
                    patches.set(owner, name, wrapped)
        for name in _FUNCTIONAL:
            original = getattr(_functional_collectives, name, None)
            if original is not None:
                patches.set(_functional_collectives, name, self._wrap(name, original))
        patches.set(distributed_c10d.Work, "wait", self._wrap_wait(distributed_c10d.Work.wait))

    def take(self) -> dict[CollectiveKey, Totals]:
        """The collectives of the step that ended; the next one begins empty."""
        step, self.step = self.step, {}
        self.settle(wait=False)
        return step

    def totals(self, key: CollectiveKey) -> Totals:
        """The row of the step in progress."""
        return self.step.setdefault(key, Totals())

    def key_of(self, op: str, frame: FrameType | None, group: Any, caller: str) -> CollectiveKey:
        """The row for a call of `op` from this frame on; in a backward thread of its own, the line of the backward."""
        site = self._sites.of_frame(frame)
        phase = self._phase()
        if site < 0 and phase == "backward":
            site = self._backward_site()
        try:
            backend, size = str(dist.get_backend(group)), dist.get_world_size(group)
        except (RuntimeError, ValueError, AssertionError):  # a group that this rank is no member of
            backend, size = "", 0
        return CollectiveKey(op, site, phase, backend, size, caller)

    def add_stall(self, totals: Totals, start: torch.cuda.Event, end: torch.cuda.Event, num_bytes: int) -> None:
        """What lies between two recorded events is exposed; it is read when the device has passed them."""
        totals.num_open += 1
        self._stalls.append(Stall(totals, start, end, num_bytes))

    def settle(self, *, wait: bool) -> None:
        """Read the events that the device has passed; with `wait`, all of them."""
        left = []
        for stall in self._stalls:
            if wait:
                stall.end.synchronize()
            if not stall.end.query():
                left.append(stall)
                continue
            seconds = stall.start.elapsed_time(stall.end) * 1e-3
            stall.totals.add(seconds, seconds, stall.bytes)
            stall.totals.num_open -= 1
        self._stalls = left

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        inside = self._inside
        is_compiling = torch.compiler.is_dynamo_compiling

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            if self.is_fenced:
                raise CaptureError(f"'{name}' talks to the other ranks, and a trial runs on one rank alone")
            if not self.is_active or getattr(inside, "call", False):
                return original(*args, **kwargs)
            frame = sys._getframe(1)
            totals, num_bytes, is_stalled = self._begin(name, frame, args, kwargs)
            inside.call = True
            start = recorded_event() if is_stalled else None
            start_s = perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                inside.call = False
            seconds = perf_counter() - start_s
            self._after_call()
            if isinstance(result, distributed_c10d.Work):
                self._open[result] = Open(totals, start_s, num_bytes, start is not None)
            elif start is not None:
                self.add_stall(totals, start, recorded_event(), num_bytes)
            elif not is_stalled:
                totals.add(seconds, seconds, num_bytes)
            return result

        return collective

    def _begin(
        self, name: str, frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Totals, int, bool]:
        """Count a call: (its row, its bytes, whether its stream is to be watched)."""
        tensors = [] if name.endswith("object") or "object_list" in name else list(tensors_in((args, kwargs)))
        num_bytes = max((t.numel() * t.element_size() for t in tensors), default=0)
        module = str(frame.f_globals.get("__name__", ""))
        caller = "" if self._sites.is_user_code(frame.f_code) else module
        totals = self.totals(self.key_of(name, frame, _group(args, kwargs), caller))
        totals.num += 1
        totals.bytes += num_bytes
        on_device = any(t.is_cuda for t in tensors) or (not tensors and uses_cuda())
        # FSDP runs its collectives beside the work, on a stream of its own; what the work waits is measured by `stalls`.
        is_beside = on_device and caller.startswith("torch.distributed.fsdp")
        is_captured = on_device and torch.cuda.is_current_stream_capturing()  # an event in a graph times nothing
        return totals, num_bytes, on_device and not is_beside and not is_captured

    def _wrap_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        inside = self._inside

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            opened = self._open.pop(work, None) if self._open and not getattr(inside, "call", False) else None
            if opened is None:
                return original(work, *args, **kwargs)
            start = recorded_event() if opened.on_device else None
            start_s = perf_counter()
            result = original(work, *args, **kwargs)
            end_s = perf_counter()
            self._after_call()
            if start is not None:
                self.add_stall(opened.totals, start, recorded_event(), opened.bytes)
            else:
                opened.totals.add(end_s - opened.start_s, end_s - start_s, opened.bytes)
            return result

        return wait


def _group(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The process group among the arguments; None is the default group."""
    if isinstance(kwargs.get("group"), dist.ProcessGroup):
        return kwargs["group"]
    return next((a for a in args if isinstance(a, dist.ProcessGroup)), None)


def recorded_event(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    """A timing event, recorded on this stream or the current one."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
