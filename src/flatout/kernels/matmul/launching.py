"""Launches of Triton kernels with as little work on the host as there can be, and memory that launches on one stream share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

CAPTURING: Final = -1
"""Stands for the stream while a graph is captured on it."""
_SPARE: Final = 256
"""Counters for captured launches of one problem; more than that are set to zero by a launch of their own."""
_scratch: dict[tuple[torch.device, int], Tensor] = {}


class Launch:
    """A kernel on one grid. The first call compiles; later ones, whose tensors lie as the first's did, go straight to the driver.

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
    """At least `num` float32 numbers for one call: the same for all calls on a stream, which come one after the other."""
    if stream == CAPTURING or device.type == "cpu":
        return torch.empty((num,), dtype=torch.float32, device=device)
    kept = _scratch.get((device, stream))
    if kept is None or kept.numel() < num:
        kept = _scratch[device, stream] = torch.empty((num,), dtype=torch.float32, device=device)
    return kept


class Counters:
    """Zeros at first, a number for each tile, on which programs wait for each other.

    Launches on one stream come one after the other and share them; each stream has its own, and so has each launch in a captured
    graph, which may run beside others.
    """

    def __init__(self, num: int, device: torch.device) -> None:
        self._num, self._device = num, device
        self._of: dict[int, Tensor] = {}
        self._spare: list[Tensor] = []
        self._captured: list[Tensor] = []

    def of(self, stream: int) -> Tensor:
        """For a launch on the current stream. Allocated outside captured graphs, which would set them to zero at each replay."""
        kept = self._of.get(stream)
        if kept is not None:
            return kept
        if stream != CAPTURING:
            self._of[stream] = self._zeros(1)[0]
            self._spare = self._spare or self._zeros(_SPARE)
            return self._of[stream]
        if not self._spare:
            return torch.zeros((self._num,), dtype=torch.int32, device=self._device)
        self._captured.append(self._spare.pop())
        return self._captured[-1]

    def _zeros(self, num: int) -> list[Tensor]:
        width = -(-self._num // 4) * 4  # each begins at a multiple of 16 bytes
        return list(torch.zeros((num, width), dtype=torch.int32, device=self._device).unbind(0))


def _start_of(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """What `compiled[grid]` does, without the hooks that profilers of Triton's hang in."""
    start, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    stream_of, current_device = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
    x, y, z = grid

    def launch(*args: object) -> None:
        start(x, y, z, stream_of(current_device()), function, packed, None, None, None, *args)

    return launch
