"""One rank's copy of its state in the node's memory: two files written in turn, each whole or not there.

A file is a header of one page, the tensors' bytes, and a JSON that describes them. The header is erased before anything else is
written and made last, so that what a writer left that was killed is known; sums tell what has changed since.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from flatout.errors import CheckpointError
from flatout.surviving.abreast import abreast
from flatout.training import checkpoint_files as files
from flatout.training.checkpoint_files import Chunk, Entry, Index
from flatout.training.checkpoint_parts import RANDOM, Part
from flatout.training.scattered import united

_PAGE: Final = 4096
_ALIGNED: Final = 64
_MAGIC: Final = b"flatout1"
_HEAD: Final = struct.Struct("<8sqqqqqq32sI")
"""Magic, step, rank, number of ranks, whether sharded, where the JSON begins, its bytes, the job, and the JSON's CRC-32."""
_SUM: Final = struct.Struct("<I")
_SPARE_BYTES: Final = 1 << 16
"""What the JSON may grow by before the file is made anew."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the file: where its bytes are, their sum, and what of the whole they are."""

    dtype: str
    shape: tuple[int, ...]
    at: int
    crc32: int
    offset: tuple[int, ...]
    whole: tuple[int, ...]


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON."""

    plain: dict[str, Any]
    tensors: dict[str, Held]


class Head(NamedTuple):
    """What the header says."""

    step: int
    rank: int
    num_ranks: int
    is_sharded: bool
    """Some tensor is only a part of a whole."""
    meta_at: int
    meta_bytes: int
    job: str
    meta_crc32: int

    @property
    def num_bytes(self) -> int:
        """Of the file, as far as it is used."""
        return self.meta_at + self.meta_bytes


def head_of(data: bytes) -> Head | None:
    """The header in the first page of a file; None where it is not whole."""
    if len(data) < _PAGE or data[: len(_MAGIC)] != _MAGIC:
        return None
    if _SUM.unpack_from(data, _HEAD.size)[0] != zlib.crc32(data[: _HEAD.size]):
        return None
    _, step, rank, num_ranks, is_sharded, at, size, job, crc = _HEAD.unpack_from(data)
    return Head(step, rank, num_ranks, bool(is_sharded), at, size, job.decode(), crc)


class Slot:
    """A file of the node's memory that is written again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: mmap.mmap | None = None
        if path.exists() and path.stat().st_size >= _PAGE:
            self._map(path.stat().st_size)

    @property
    def head(self) -> Head | None:
        """Of what is whole in it; None where nothing is."""
        return head_of(self._file[:_PAGE]) if self._file is not None else None

    def erase(self) -> None:
        """There is nothing whole in it any more."""
        if self._file is not None:
            self._file[: len(_MAGIC)] = bytes(len(_MAGIC))

    def write(
        self,
        step: int,
        job: str,
        ranks: tuple[int, int],
        plain: dict[str, Any],
        tensors: Mapping[str, Part],
        *,
        is_scattered: bool = False,
    ) -> int:
        """Copy a state of `ranks[0]` of `ranks[1]`; dense tensors of the CPU. Its bytes. Raises CheckpointError without room.

        `is_scattered`: it is not all of the state, though its tensors are whole.
        """
        self.erase()
        places: list[tuple[Part, int]] = []
        at = _PAGE
        for part in tensors.values():
            places.append((part, at))
            at += _aligned(part.local)
        view = self._room(at)
        copied = abreast(lambda place: self._copied(view, *place), places, num_bytes=at)
        held = dict(zip(tensors, copied, strict=True))
        meta = msgspec.json.encode(Meta(plain=plain, tensors=held))
        self._room(at + len(meta))
        assert self._file is not None
        self._file[at : at + len(meta)] = meta
        is_sharded = is_scattered or any(h.shape != h.whole for h in held.values())
        head = _HEAD.pack(_MAGIC, step, *ranks, is_sharded, at, len(meta), job.encode()[:32], zlib.crc32(meta))
        self.seal(head + _SUM.pack(zlib.crc32(head)))
        return at + len(meta)

    def room_for(self, size: int) -> Tensor:
        """Its bytes behind the header, to be filled; nothing is whole until `seal`."""
        self.erase()
        return self._room(size)[_PAGE:size]

    def seal(self, head: bytes) -> None:
        """Write the header: all before it is there."""
        assert self._file is not None
        self._file[len(_MAGIC) : len(head)] = head[len(_MAGIC) :]
        self._file[: len(_MAGIC)] = head[: len(_MAGIC)]

    def bytes_of(self, size: int) -> Tensor:
        """Its first bytes as they lie."""
        return self._room(size)[:size]

    def _copied(self, view: Tensor, part: Part, at: int) -> Held:
        """Copy one tensor, and sum up what has arrived."""
        local = part.local.detach()
        size = local.numel() * local.element_size()
        crc = 0
        if size:
            view[at : at + size].view(local.dtype).view(local.shape).copy_(local)
            crc = zlib.crc32(view[at : at + size].numpy().data)
        return Held(files.dtype_name(local.dtype), tuple(local.shape), at, crc, part.offset, part.shape)

    def _room(self, size: int) -> Tensor:
        """The file as bytes, made larger where it is too small. Raises CheckpointError."""
        if self._file is None or len(self._file) < size:
            whole = -(-(size + _SPARE_BYTES) // _PAGE) * _PAGE
            old = self._file
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, whole)  # a write without room would kill the process
            except OSError as e:
                raise CheckpointError(
                    f"'{self.path}' has no room for a copy of {whole / 2**20:.1f} MiB: {e.strerror}; give the supervisor a "
                    "larger file system in memory (--memory), or keep fewer bytes"
                ) from e
            finally:
                os.close(descriptor)
            self._map(whole)
            del old
        assert self._file is not None
        return torch.frombuffer(self._file, dtype=torch.uint8)

    def _map(self, size: int) -> None:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._file = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)


class Copy:
    """A copy that was found whole, by its bytes."""

    def __init__(self, data: Tensor, where: str) -> None:
        """Raises CheckpointError when it is damaged."""
        head = head_of(data[:_PAGE].numpy().tobytes())
        if head is None or data.numel() < head.num_bytes:
            raise CheckpointError(f"the copy in '{where}' is torn")
        meta = data[head.meta_at : head.num_bytes].numpy().tobytes()
        if zlib.crc32(meta) != head.meta_crc32:
            raise CheckpointError(f"the copy of step {head.step} in '{where}' is damaged")
        self.head, self.data = head, data[: head.num_bytes]
        self.meta = msgspec.json.decode(meta, type=Meta)
        held = self.meta.tensors
        sums = abreast(lambda h: files.tensor_sum(self._bytes(h)), list(held.values()), num_bytes=data.numel())
        bad = next((name for (name, h), crc in zip(held.items(), sums, strict=True) if h.crc32 != crc), None)
        if bad is not None:
            raise CheckpointError(f"the copy of step {head.step} in '{where}' is damaged: '{bad}' has other bytes")

    def tensor(self, name: str) -> Tensor:
        """As it lies; to be copied by who uses it."""
        held = self.meta.tensors[name]
        dtype = getattr(torch, held.dtype)
        raw = self._bytes(held)
        return raw.view(dtype).view(held.shape) if raw.numel() else torch.empty(held.shape, dtype=dtype)

    def _bytes(self, held: Held) -> Tensor:
        size = getattr(torch, held.dtype).itemsize
        for n in held.shape:
            size *= n
        return self.data[held.at : held.at + size]


def read_copy(path: Path) -> Copy:
    """Raises CheckpointError when there is none in the file that is whole."""
    try:
        data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as e:
        raise CheckpointError(f"the copy in '{path}' cannot be read: {e}") from e
    return Copy(data, str(path))


def index_of(copies: Mapping[int, Copy]) -> Index:
    """Copies of several ranks as one whole; chunks are in the 'file' of their rank's number."""
    first = copies[min(copies)]
    tensors: dict[str, Entry] = {}
    numbers: dict[str, Any] = {}
    for rank, copy in sorted(copies.items()):
        numbers |= copy.meta.plain[RANDOM]
        for name, held in copy.meta.tensors.items():
            known = tensors.get(name)
            chunk = Chunk(file=f"{rank}", offset=held.offset, shape=held.shape, crc32=held.crc32)
            chunks = known.chunks if known is not None else ()
            if any(c.offset == chunk.offset and c.shape == chunk.shape for c in chunks):
                continue  # of a replicated tensor the first is as good as the others
            tensors[name] = Entry(dtype=held.dtype, shape=held.whole, chunks=(*chunks, chunk))
    return Index(
        version=1,
        step=first.head.step,
        serial=0,
        num_ranks=first.head.num_ranks,
        torch=str(torch.__version__),
        parts={**united([copy.meta.plain for _, copy in sorted(copies.items())]), RANDOM: numbers},
        tensors=tensors,
        files={},
    )


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
