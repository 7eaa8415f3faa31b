"""Copies of tensors in the host's memory that the host does not wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.core.errors import UsageError

_PIECE_BYTES: Final = 256 << 20
"""What is copied to the host at once. The link to the host is full from some MiB on; two pieces are all that must be free."""
_ALIGNED: Final = 64
_SHARE_OF_FREE: Final = 0.5


class StagedCopies(NamedTuple):
    """Host copies that are there once `ready` says so; `began` and `ended`: what of it the device's own stream had to do."""

    tensors: dict[str, Tensor]
    ready: torch.cuda.Event | None
    began: torch.cuda.Event | None
    ended: torch.cuda.Event | None

    def wait(self) -> float:
        """Until the copies are there; the seconds that the device's own stream spent on them, 0 on a CPU."""
        if self.ready is None or self.began is None or self.ended is None:
            return 0.0
        self.ready.synchronize()
        self.ended.synchronize()
        return float(self.began.elapsed_time(self.ended)) / 1e3


class _HostBuffer(NamedTuple):
    """Host memory for one tensor, kept from copy to copy."""

    memory: Tensor
    """Bytes; pinned for tensors of a device."""
    place: int
    """Which allocation it lies in, and from where on."""
    offset: int
    view: Tensor
    """The same, as the tensor it is a copy of."""


class Staging:
    """Copies tensors as they are now, in stream order, into host memory that is kept for the next time.

    Tensors of a CUDA device are first copied on the device, as far as half of its free memory goes, and from there to pinned
    memory on a stream of its own, while the caller's stream goes on; what does not fit is waited for by the caller's stream,
    not by the host. Tensors of a CPU are copied at once. One call's copies are overwritten by the next.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, _HostBuffer] = {}
        self._allocated_for: dict[str, tuple[torch.Size, torch.dtype, bool]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> StagedCopies:
        """Host copies of local, dense tensors of a CPU and at most one CUDA device; only `StagedCopies.wait` waits for them.

        Raises UsageError for tensors of several devices.
        """
        devices = {str(t.device) for t in tensors.values() if t.is_cuda}
        if len(devices) > 1:
            raise UsageError(f"tensors lie on {', '.join(sorted(devices))}; a process copies those of one device")
        self._make_room(tensors)
        copies = {name: self._buffers[name].view for name in tensors}
        on_device = {name: t for name, t in tensors.items() if t.is_cuda}
        here = [name for name in tensors if name not in on_device]
        with torch.no_grad():
            if here:
                torch._foreach_copy_([copies[name] for name in here], [tensors[name] for name in here])
            if not on_device:
                return StagedCopies(copies, None, None, None)
            device = next(iter(on_device.values())).device
            with torch.cuda.device(device):
                return self._from_device(on_device, copies, device)

    def _from_device(self, tensors: dict[str, Tensor], copies: dict[str, Tensor], device: torch.device) -> StagedCopies:
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        here = torch.cuda.current_stream(device)
        began, ended, ready = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        began.record(here)
        pieces = _Pieces(device, int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_FREE))
        for names in self._groups(tensors):
            first, last = self._buffers[names[0]], self._buffers[names[-1]]
            low, high = first.offset, last.offset + tensors[names[-1]].nbytes
            for at in range(low, high, _PIECE_BYTES):
                till = min(high, at + _PIECE_BYTES)
                piece = pieces.take(here, till - at)
                if len(names) > 1:
                    views = [_cast(piece, tensors[n], self._buffers[n].offset - low) for n in names]
                    torch._foreach_copy_(views, [tensors[n] for n in names])
                else:
                    flat = tensors[names[0]].contiguous().view(-1).view(torch.uint8)
                    piece[: till - at].copy_(flat[at - low : till - low])
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    first.memory[at:till].copy_(piece[: till - at], non_blocking=True)
                pieces.give(stream, piece)
        ended.record(here)
        ready.record(stream)
        return StagedCopies(copies, ready, began, ended)

    def _groups(self, tensors: dict[str, Tensor]) -> list[list[str]]:
        """Names whose copies lie in one allocation, in order."""
        groups: dict[int, list[str]] = {}
        for name in tensors:
            groups.setdefault(self._buffers[name].place, []).append(name)
        return list(groups.values())

    def _make_room(self, tensors: Mapping[str, Tensor]) -> None:
        """Host memory for all of them: as it was if they are as they were, else anew."""
        wanted = {name: (t.shape, t.dtype, t.is_cuda) for name, t in tensors.items()}
        if wanted == self._allocated_for:
            return
        self._allocated_for = wanted
        self._buffers.clear()
        for is_cuda in (True, False):
            group: list[str] = []
            size = 0
            for name in [n for n, t in tensors.items() if t.is_cuda == is_cuda]:
                taken = _aligned(tensors[name].nbytes)
                if group and size + taken > _PIECE_BYTES:
                    self._allocate({n: tensors[n] for n in group}, is_cuda)
                    group, size = [], 0
                group.append(name)
                size += taken
            if group:
                self._allocate({n: tensors[n] for n in group}, is_cuda)
        self._buffers = {name: self._buffers[name] for name in tensors}

    def _allocate(self, tensors: dict[str, Tensor], is_pinned: bool) -> None:
        sizes = [_aligned(t.nbytes) for t in tensors.values()]
        memory = torch.empty(max(1, sum(sizes)), dtype=torch.uint8, pin_memory=is_pinned)
        offset, place = 0, len(self._buffers)
        for (name, tensor), size in zip(tensors.items(), sizes, strict=True):
            flat = memory[offset : offset + tensor.nbytes]
            self._buffers[name] = _HostBuffer(memory, place, offset, flat.view(tensor.dtype).view(tensor.shape))
            offset += size


class _Pieces:
    """Device memory on the way to the host: as many pieces as the limit allows, at least one, then the oldest again."""

    def __init__(self, device: torch.device, limit: int) -> None:
        self._device, self._left = device, limit
        self._lent: list[tuple[Tensor, torch.cuda.Event]] = []

    def take(self, here: torch.cuda.Stream, size: int) -> Tensor:
        """Take a buffer of at least `size` bytes for the stream."""
        large = next((number for number, (old, _) in enumerate(self._lent) if old.numel() >= size), None)
        if self._left < size and large is not None:
            old, done = self._lent.pop(large)
            here.wait_event(done)
            return old
        self._left -= size
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def give(self, stream: torch.cuda.Stream, piece: Tensor) -> None:
        """The stream reads from it last."""
        piece.record_stream(stream)
        done = torch.cuda.Event()
        done.record(stream)
        self._lent.append((piece, done))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _cast(piece: Tensor, like: Tensor, offset: int) -> Tensor:
    return piece[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
