"""Where streamed weights lie: in pinned memory of the host, or in files that a thread reads into a few pinned buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flatout.core.errors import CheckpointError, HardwareError

_PAGE: Final = 4096
"""Bytes: what is pinned at once, so that two stretches must not share one."""
_PINNERS: Final = 8
"""Threads that pin: the system call goes through all pages of a stretch."""


class RingPlace:
    """Memory of the ring on the device, and on a GPU the stream of copies to it, what a copy waits for and what it records."""

    def __init__(self, number: int, memory: Tensor, stream: torch.cuda.Stream | None) -> None:
        self.number, self.memory, self.stream = number, memory, stream
        if stream is not None:
            self._freed, self._arrived = torch.cuda.Event(), torch.cuda.Event()

    def copy(self, host: Tensor) -> None:
        """Onto the place, after it is free."""
        into = self.memory[: host.numel()]
        if self.stream is None:
            into.copy_(host)
            return
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self._freed)
            into.copy_(host, non_blocking=True)
            self._arrived.record(self.stream)

    def free(self) -> None:
        """What was queued on the current stream until now used the place."""
        if self.stream is not None:
            self._freed.record(torch.cuda.current_stream(self.stream.device))

    def wait(self) -> None:
        """What the current stream is given from now on comes after the copy."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_event(self._arrived)


def host_memory(num_bytes: int) -> Tensor:
    """Uninitialised bytes in pages of their own."""
    raw = torch.empty(num_bytes + 2 * _PAGE, dtype=torch.uint8)
    return raw[-raw.data_ptr() % _PAGE :][:num_bytes]


class PinnedSource:
    """One stretch of host memory a layer, pinned where the device is a GPU.

    Memory of torch is registered with the driver instead of being asked of its pinned allocator, which rounds up to a power of
    two: 2 GiB for a layer of 1.7.
    """

    def __init__(self, stretches: Sequence[Tensor], *, is_pinned: bool) -> None:
        self.stretches = list(stretches)
        self._registered: list[int] = []
        if is_pinned:
            with ThreadPoolExecutor(_PINNERS) as pool:
                self._registered = list(pool.map(_register, self.stretches))

    def send(self, number: int, place: RingPlace) -> Callable[[], None]:
        """Queue the copy of a layer; nothing is left to wait for."""
        place.copy(self.stretches[number])
        return lambda: None

    def close(self) -> None:
        """The memory stays, no longer pinned."""
        for address in self._registered:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._registered.clear()


class DiskSource:
    """One file a layer, read by a thread into the next of a few buffers, and sent from there."""

    def __init__(self, files: Sequence[Path], sizes: Sequence[int], *, num_buffers: int, is_pinned: bool) -> None:
        self.files, self._sizes = list(files), list(sizes)
        self._buffers = [host_memory(max(sizes)) for _ in range(num_buffers)]
        self._pinned = PinnedSource(self._buffers, is_pinned=is_pinned)
        self._sent: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="flatout-read")

    def send(self, number: int, place: RingPlace) -> Callable[[], None]:
        """Have a layer read and its copy queued; what is returned waits, on the host, until it has been."""
        future: Future[None] = self._thread.submit(self._read_and_copy, number, place)
        return future.result

    def _read_and_copy(self, number: int, place: RingPlace) -> None:
        at = self._next
        self._next = (at + 1) % len(self._buffers)
        sent = self._sent[at]
        if sent is not None:
            sent.synchronize()
        buffer = self._buffers[at][: self._sizes[number]]
        read_file_into(buffer, self.files[number])
        place.copy(buffer)
        if place.stream is not None:
            self._sent[at] = place.stream.record_event()

    def close(self) -> None:
        """Release the thread and the pinned buffers; the files stay."""
        self._thread.shutdown(wait=True)
        self._pinned.close()


def write_bytes(stretch: Tensor, path: Path) -> None:
    """The bytes of a stretch. Raises CheckpointError where they cannot be written."""
    try:
        with path.open("wb") as file:
            file.write(_view(stretch))
    except OSError as e:
        raise CheckpointError(f"cannot write '{path}': {e.strerror or e}; give a folder with room") from e


def read_file_into(stretch: Tensor, path: Path) -> None:
    """A whole file into memory. Raises CheckpointError for a file that cannot be read or is shorter."""
    view, at = _view(stretch), 0
    try:
        with path.open("rb", buffering=0) as file:
            while at < len(view):
                num = file.readinto(view[at:])  # Linux reads at most 2 GiB at a time
                if not num:
                    raise CheckpointError(f"'{path}' ends after {at} of {len(view)} bytes; write the layers again")
                at += num
    except OSError as e:
        raise CheckpointError(f"cannot read '{path}': {e.strerror or e}") from e


def _view(stretch: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * stretch.numel()).from_address(stretch.data_ptr())).cast("B")


def _register(stretch: Tensor) -> int:
    address = stretch.data_ptr()
    code = torch.cuda.cudart().cudaHostRegister(address, -(-stretch.numel() // _PAGE) * _PAGE, 0)
    if int(code) != 0:
        raise HardwareError(
            f"the driver does not pin {stretch.numel()} bytes of host memory ({code}); stream less, or from disk"
        )
    return address
