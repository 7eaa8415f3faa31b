"""Launches of Triton kernels with as little work on the host as there can be, and memory that launches on one stream share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock, local
from typing import Any, Final

import torch
from torch import Tensor

CAPTURING: Final = -1
"""Stands for the stream while a graph is captured on it."""
_STORE: Final = 1 << 16
"""Counters allocated at a time, of 4 bytes."""
_THREAD: Final = local()
_scratch: dict[tuple[torch.device, int], Tensor] = {}


class TritonLaunch:
    """A Triton kernel on one grid. The first call compiles; later ones, with tensors laid out alike, go straight to the driver.

    What Triton looks at in every argument of every call (types, multiples of 16, constants) is the same in each call of a
    bound problem, but for addresses: tensors that do not begin at a multiple of 16 bytes take Triton's own path. Addresses
    are handed over as numbers, since for each tensor Triton asks the driver whether it is the device's.
    """

    def __init__(self, kernel: Any, num_programs: int | tuple[int, int, int], **options: Any) -> None:
        self._kernel, self._options = kernel, options
        self._grid = num_programs if isinstance(num_programs, tuple) else (num_programs, 1, 1)
        self._start: Callable[..., None] | None = None
        self._places: list[int] = []

    def __call__(self, *args: Any) -> None:
        if self._start is not None:
            filled, begins = list(args), 0
            for place in self._places:
                filled[place] = address = filled[place].data_ptr()
                begins |= address
            if not begins & 15:
                self._start(*filled)
                return
        compiled = self._kernel[self._grid](*args, **self._options)
        places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
        # The interpreter compiles nothing; and what was compiled for other addresses would do, but slowly.
        if compiled is not None and not any(args[i].data_ptr() & 15 for i in places):
            self._places, self._start = places, _start_of(compiled, self._grid)


def stream_now() -> int:
    """The current stream, CAPTURING while a graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        return CAPTURING
    stream: int = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    return stream


def scratch(num: int, device: torch.device, stream: int) -> Tensor:
    """Scratch memory of at least `num` float32 numbers, which launches on one stream share, as they come one after the other."""
    if stream == CAPTURING or device.type == "cpu":
        return torch.empty((num,), dtype=torch.float32, device=device)
    cached = _scratch.get((device, stream))
    if cached is None or cached.numel() < num:
        cached = _scratch[device, stream] = torch.empty((num,), dtype=torch.float32, device=device)
    return cached


def scratch_and_counters(num: int, counters: Counters, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scratch memory of `num` float32 numbers, and counters, for a launch on the current stream."""
    stream = CAPTURING
    if device.type == "cuda":
        enter(device)
        stream = stream_now()
    return scratch(num, device, stream), counters.of(stream)


class Counters:
    """Zeros at first, a number for each tile, on which programs wait for each other.

    Launches on one stream come one after the other and share them; each stream has its own, and so has each launch in a captured
    graph, which may run beside others.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        self._num, self._device = num, device
        self._of: dict[int, Tensor] = {}
        self._captured: list[Tensor] = []
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _store_of(device).fill()

    def of(self, stream: int) -> Tensor:
        """The counters for a launch on the current stream."""
        cached = self._of.get(stream)
        if cached is not None:
            return cached
        taken = _store_of(self._device).take(self._num, may_fill=stream != CAPTURING)
        if taken is None:  # a launch of its own, at each replay
            return torch.zeros((self._num,), dtype=torch.int32, device=self._device)
        if stream == CAPTURING:
            self._captured.append(taken)
        else:
            self._of[stream] = taken
        return taken


class _Store:
    """Counters of one device, allocated and set to zero outside captured graphs: what a graph allocates, a replay sets to zero
    again, by a launch of its own. A captured launch keeps its counters for good."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rest: Tensor | None = None
        self._lock = Lock()

    def fill(self) -> None:
        """Have a store for captured launches to come."""
        with self._lock:
            if self._rest is None or self._rest.numel() < _STORE // 4:
                self._rest = self._zeros(_STORE)

    def take(self, num: int, *, may_fill: bool) -> Tensor | None:
        """Take `num` zeros that nobody else has; None when there are no more and none may be allocated."""
        width = -(-num // 4) * 4  # each begins at a multiple of 16 bytes
        with self._lock:
            if self._rest is None or self._rest.numel() < width:
                if not may_fill:
                    return None
                self._rest = self._zeros(max(_STORE, width))
            taken, self._rest = self._rest[:num], self._rest[width:]
            return taken

    def _zeros(self, num: int) -> Tensor:
        zeros = torch.zeros((num,), dtype=torch.int32, device=self._device)
        if zeros.is_cuda:  # once for many thousands: any stream may use them
            torch.cuda.current_stream(self._device).synchronize()
        return zeros


_store_of = cache(_Store)


def enter(device: torch.device) -> None:
    """Give this thread the device's context, which a thread that has launched nothing has not, and descriptors need."""
    known: set[torch.device] | None = getattr(_THREAD, "entered", None)
    if known is None:
        known = _THREAD.entered = set()
    if device not in known:
        torch.zeros(1, device=device)
        known.add(device)


def _start_of(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What `compiled[grid]` does, without the hooks that profilers of Triton's hang in."""
    start, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    x, y, z = grid

    def launch(*args: object) -> None:
        start(x, y, z, stream_of(current_device()), function, packed, None, None, None, *args)

    return launch
