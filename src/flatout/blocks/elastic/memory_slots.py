"""One rank's copy of its state in the node's memory: two files written in turn, each whole or not there.

A file is a header of one page, the tensors' bytes, and a JSON that describes them. The header is erased before anything else is
written and made last, so that what a writer left that was killed is recognised; checksums show what has changed since.
"""

from __future__ import annotations

import math
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

from flatout.blocks.training import checkpoint_files as files
from flatout.blocks.training.checkpoint_files import CheckpointIndex, Chunk, TensorEntry
from flatout.blocks.training.checkpoint_parts import RANDOM, Scattered, SplitState, TensorPart, split_state, unite_parts
from flatout.core.errors import CheckpointError, RecordError
from flatout.core.records.record import decode_json
from flatout.core.tensors.checksum import checksum

_PAGE: Final = 4096
_ALIGNED: Final = 64
_MAGIC: Final = b"flatout1"
_HEAD: Final = struct.Struct("<8sqqqqqq32sI")
"""Magic, step, rank, number of ranks, whether sharded, where the JSON begins, its bytes, the job, and the JSON's CRC-32."""
_SUM: Final = struct.Struct("<I")
_SPARE_BYTES: Final = 1 << 16
"""What the JSON may grow by before the file is created anew."""


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the file: where its bytes are, their checksum, and which part of the whole they are."""

    dtype: str
    shape: tuple[int, ...]
    at: int
    crc32: int
    offset: tuple[int, ...]
    whole: tuple[int, ...]


class CopyMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON at the end of the file."""

    plain: dict[str, Any]
    tensors: dict[str, StoredTensor]


class CopyHeader(NamedTuple):
    """The fields of the header of a file."""

    step: int
    rank: int
    num_ranks: int
    is_sharded: bool
    """Whether some tensor is only a part of a whole."""
    meta_at: int
    meta_bytes: int
    job: str
    meta_crc32: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that are used."""
        return self.meta_at + self.meta_bytes


def parse_header(data: bytes) -> CopyHeader | None:
    """The header in the first page of a file; None where it is not whole."""
    if len(data) < _PAGE or data[: len(_MAGIC)] != _MAGIC:
        return None
    if _SUM.unpack_from(data, _HEAD.size)[0] != zlib.crc32(data[: _HEAD.size]):
        return None
    _, step, rank, num_ranks, is_sharded, at, size, job, crc = _HEAD.unpack_from(data)
    if min(step, rank, num_ranks, size) < 0 or at < _PAGE:
        return None
    return CopyHeader(step, rank, num_ranks, bool(is_sharded), at, size, job.decode(errors="replace"), crc)


class MemorySlot:
    """A file of the node's memory that is written again and again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: mmap.mmap | None = None
        if path.exists() and path.stat().st_size >= _PAGE:
            self._map(path.stat().st_size)

    @property
    def head(self) -> CopyHeader | None:
        """The header of what is whole in it; None where nothing is."""
        return parse_header(self._file[:_PAGE]) if self._file is not None else None

    def erase(self) -> None:
        """Make what is in it invalid."""
        if self._file is not None:
            self._file[: len(_MAGIC)] = bytes(len(_MAGIC))

    def write(self, step: int, job: str, ranks: tuple[int, int], state: SplitState) -> int:
        """Copy a state of `ranks[0]` of `ranks[1]`; dense tensors of the CPU. Its bytes. Raises CheckpointError without room."""
        self.erase()
        places: list[tuple[TensorPart, int]] = []
        at = _PAGE
        for part in state.tensors.values():
            places.append((part, at))
            at += -(-part.local.nbytes // _ALIGNED) * _ALIGNED
        view = self._room(at)
        copied = files.parallel_map(lambda place: self._copied(view, *place), places, num_bytes=at)
        stored = dict(zip(state.tensors, copied, strict=True))
        meta = msgspec.json.encode(CopyMetadata(plain=state.plain, tensors=stored))
        self._room(at + len(meta))
        assert self._file is not None
        self._file[at : at + len(meta)] = meta
        is_sharded = state.is_scattered or any(h.shape != h.whole for h in stored.values())
        head = _HEAD.pack(_MAGIC, step, *ranks, is_sharded, at, len(meta), job.encode()[:32], zlib.crc32(meta))
        self.seal(head + _SUM.pack(zlib.crc32(head)))
        return at + len(meta)

    def room_for(self, size: int) -> Tensor:
        """So many bytes behind the header, to be filled; nothing is valid until `seal`."""
        self.erase()
        return self._room(_PAGE + size)[_PAGE : _PAGE + size]

    def seal(self, head: bytes) -> None:
        """Write the header, once all the rest is there."""
        assert self._file is not None
        self._file[len(_MAGIC) : len(head)] = head[len(_MAGIC) :]
        self._file[: len(_MAGIC)] = head[: len(_MAGIC)]

    def bytes_of(self, size: int) -> Tensor:
        """The first `size` bytes of the file."""
        return self._room(size)[:size]

    def _copied(self, view: Tensor, part: TensorPart, at: int) -> StoredTensor:
        """Copy one tensor, and checksum what has arrived."""
        local = part.local.detach()
        size, crc = local.nbytes, 0
        if size:
            view[at : at + size].view(local.dtype).view(local.shape).copy_(local)
            crc = zlib.crc32(view[at : at + size].numpy().data)
        return StoredTensor(files.torch_dtype_name(local.dtype), tuple(local.shape), at, crc, part.offset, part.shape)

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
                    "larger file system in memory (--memory-folder), or keep fewer bytes"
                ) from e
            finally:
                os.close(descriptor)
            self._map(whole)
            del old
        assert self._file is not None
        return torch.frombuffer(self._file, dtype=torch.uint8)

    def _map(self, size: int) -> None:
        with self.path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), size)


class StateCopy:
    """A copy of one rank's state whose bytes have been checked."""

    def __init__(self, data: Tensor, where: str) -> None:
        """Raises CheckpointError when it is damaged."""
        head = parse_header(data[:_PAGE].numpy().tobytes())
        if head is None or data.numel() < head.num_bytes:
            raise CheckpointError(f"the copy in '{where}' is torn")
        meta = data[head.meta_at : head.num_bytes].numpy().tobytes()
        if zlib.crc32(meta) != head.meta_crc32:
            raise CheckpointError(f"the copy of step {head.step} in '{where}' is damaged")
        self.head, self.data = head, data[: head.num_bytes]
        try:
            self.meta = decode_json(meta, CopyMetadata)
            stored = self.meta.tensors
            for one in stored.values():
                _check_place(one, head.meta_at)
        except (RecordError, CheckpointError) as e:
            raise CheckpointError(f"the copy of step {head.step} in '{where}' is damaged: {e}") from e
        sums = files.parallel_map(lambda h: checksum(self._bytes(h)), list(stored.values()), num_bytes=data.numel())
        bad = next((name for (name, h), crc in zip(stored.items(), sums, strict=True) if h.crc32 != crc), None)
        if bad is not None:
            raise CheckpointError(f"the copy of step {head.step} in '{where}' is damaged: '{bad}' has other bytes")

    def tensor(self, name: str) -> Tensor:
        """The stored tensor itself, on the file's memory; whoever uses it copies it."""
        stored = self.meta.tensors[name]
        dtype = files.torch_dtype(stored.dtype)
        raw = self._bytes(stored)
        return raw.view(dtype).view(stored.shape) if raw.numel() else torch.empty(stored.shape, dtype=dtype)

    def _bytes(self, stored: StoredTensor) -> Tensor:
        size = files.torch_dtype(stored.dtype).itemsize * math.prod(stored.shape)
        return self.data[stored.at : stored.at + size]


def _check_place(stored: StoredTensor, end: int) -> None:
    """Raises CheckpointError for a tensor whose bytes are not all before `end`, or that is no part of the whole it names."""
    files.check_shape(stored.shape)
    files.check_shape(stored.whole)
    size = files.torch_dtype(stored.dtype).itemsize * math.prod(stored.shape)
    if stored.at < _PAGE or stored.at % _ALIGNED or stored.at + size > end:
        raise CheckpointError(f"a tensor of {size} bytes at {stored.at} is outside of it")
    if not len(stored.shape) == len(stored.offset) == len(stored.whole) or any(
        not 0 <= a <= a + n <= m for a, n, m in zip(stored.offset, stored.shape, stored.whole, strict=True)
    ):
        raise CheckpointError("a part of a tensor is outside of the whole")


def read_copy(path: Path) -> StateCopy:
    """Read the copy in a file. Raises CheckpointError when there is none that is whole."""
    try:
        data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as e:
        raise CheckpointError(f"the copy in '{path}' cannot be read: {e}") from e
    return StateCopy(data, str(path))


def index_of(copies: Mapping[int, StateCopy]) -> CheckpointIndex:
    """The index of several ranks' copies as one whole; chunks are in the 'file' of their rank's number."""
    first = copies[min(copies)]
    ordered = sorted(copies.items())
    entries = ({n: _entry(rank, stored) for n, stored in copy.meta.tensors.items()} for rank, copy in ordered)
    return CheckpointIndex(
        version=1,
        step=first.head.step,
        serial=0,
        num_ranks=first.head.num_ranks,
        torch=str(torch.__version__),
        parts=unite_parts([copy.meta.plain for _, copy in ordered]),
        tensors=files.united_entries(entries),
        files={},
    )


def _entry(rank: int, stored: StoredTensor) -> TensorEntry:
    chunk = Chunk(f"{rank}", stored.offset, stored.shape, stored.crc32)
    return TensorEntry(stored.dtype, stored.whole, (chunk,))


# -- whether two states are the same -----------------------------------------------------------------------------------------


def state_checksums(**parts: Any) -> dict[str, str]:
    """Checksums of the parts' states and of the random numbers: by path, a text for each tensor (this rank's part) and value.

    Two states are the same if their sums are: CRC-32 of a tensor's bytes with its dtype and shape, and other values as they are.
    Tensors of a device are copied to the host for it.

    >>> state_checksums(lr={"now": 0.5})["lr/now"]
    '0.5'
    """
    return sums_of(split_state(parts, 0))


def sums_of(state: SplitState) -> dict[str, str]:
    """The checksums of a state that is split already."""
    here = [part.local for part in state.tensors.values()]
    num_bytes = sum(t.numel() * t.element_size() for t in here)
    crcs = files.parallel_map(lambda t: checksum(t.detach().cpu()), here, num_bytes=num_bytes)
    sums = plain_sums(state.plain)
    for (name, part), crc in zip(state.tensors.items(), crcs, strict=True):
        dtype = files.torch_dtype_name(part.local.dtype)
        sums[_name(name)] = sum_text(dtype, tuple(part.local.shape), part.offset, crc)
    return sums


def saved_sums(
    index: CheckpointIndex, names: Mapping[str, Any], rank: int, live: Mapping[str, TensorPart]
) -> dict[str, str]:
    """The checksums in an index of the parts of these names, as far as this rank holds the parts that one of then did."""
    saved = index.parts
    plain = {n: part.own(saved[n]) if isinstance(part, Scattered) else saved[n] for n, part in names.items()}
    numbers = saved[RANDOM].get(f"{rank}")
    if numbers is not None:
        plain[RANDOM] = {f"{rank}": numbers}
    sums = plain_sums(plain)
    here: set[str] = set()
    files.join_tensors(plain, here.add)
    for name, entry in index.tensors.items():
        if name not in here:
            continue
        part = live.get(name)
        for chunk in entry.chunks:
            is_there = part is None or (chunk.offset == part.offset and chunk.shape == tuple(part.local.shape))
            if is_there and chunk.crc32 is not None:
                sums[_name(name)] = sum_text(entry.dtype, chunk.shape, chunk.offset, chunk.crc32)
                break
        else:
            sums[_name(name)] = ANY
    return sums


ANY = "divided otherwise now"
"""In place of a sum that cannot be compared."""


def first_difference(one: Mapping[str, str], two: Mapping[str, str]) -> str | None:
    """The first place, in the order of `one`, where the states differ, in words; None where they are the same.

    >>> first_difference({"net/bias": "a", "step": "3"}, {"net/bias": "a", "step": "4"})
    'step differs: 3 was saved, and it is 4'
    """
    for name, saved in one.items():
        if name not in two:
            return f"{name} is missing; it was saved"
        if two[name] != saved and ANY not in (saved, two[name]):
            return f"{name} differs: {saved} was saved, and it is {two[name]}"
    return next((f"{name} was not saved, and it is there" for name in two if name not in one), None)


def sum_text(dtype: str, shape: tuple[int, ...], offset: tuple[int, ...], crc: int) -> str:
    """The text that stands for a tensor's part."""
    at = f" from {list(offset)}" if any(offset) else ""
    return f"{dtype} {list(shape)}{at} {crc:08x}"


def plain_sums(plain: Mapping[str, Any]) -> dict[str, str]:
    """The texts of all that is no tensor, by path."""
    return {_name(path): text for name, tree in plain.items() for path, text in files.plain_leaves(tree, name)}


def _name(path: str) -> str:
    """The path, for random numbers without the rank: they are this rank's own."""
    top, _, rest = path.partition("/")
    return f"{RANDOM}/{rest.partition('/')[2]}" if top == RANDOM else path
