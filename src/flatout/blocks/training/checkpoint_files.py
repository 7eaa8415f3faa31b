"""What a checkpoint is on disk: a folder of safetensors and one JSON, whole or not there; nothing in it is ever unpickled."""

from __future__ import annotations

import errno
import json
import math
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from flatout.core.errors import CheckpointError, RecordError, UsageError
from flatout.core.files import path_inside, read_regular_file, sync_to_disk
from flatout.core.records.record import decode_json

INDEX: Final = "checkpoint.json"
_VERSION: Final = 1
_TENSOR, _PAIRS, _TUPLE, _FLOAT = "__tensor__", "__pairs__", "__tuple__", "__float__"
_PREFIX: Final = "step-"
_MOST_DIMS: Final = 64
"""That torch allows."""
_SHARDING: Final = "DCP_SHARDING_INFO"
"""Where torch.distributed.checkpoint's reader of Hugging Face files looks for the offsets of shards (torch 2.7 and later)."""
_BLOCK: Final = 16 << 20
_NUM_THREADS: Final = 4
"""One sums up 2 GB/s (CRC-32 of zlib, EPYC 2026); ranks of one node share its cores."""
_WORTH_BYTES: Final = 64 << 20
"""Below that a thread is not worth its start."""
Item = TypeVar("Item")
Value = TypeVar("Value")
Fetch = Callable[["Chunk", tuple[slice, ...]], Tensor]
"""Gives a piece of a chunk."""
UNREADABLE: Final = 1 << 60
"""Stands for the serial of a checkpoint whose index cannot be read."""


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor: `shape` elements from `offset` on, in `file`; by `crc32` of its bytes a resume is proved."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int | None = None


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as a whole: its dtype as torch names it, its shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The size in bytes and the CRC-32 by which a file is known to be whole."""

    num_bytes: int
    crc32: int


class CheckpointIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`checkpoint.json`. `serial` counts the checkpoints of a folder; `parts` has `{"__tensor__": name}` where tensors were."""

    version: int
    step: int
    serial: int
    num_ranks: int
    torch: str
    parts: dict[str, Any]
    tensors: dict[str, TensorEntry]
    files: dict[str, FileSum]


# -- what is saved, as a tree ------------------------------------------------------------------------------------------------


class SplitTensors(dict[str, Tensor]):
    """Tensors by the path to them; of those that share one memory, as tied weights do, the first alone."""

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[object, str] = {}

    def add(self, name: str, tensor: Tensor) -> str:
        """Add a tensor; the name by which it is here."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.data_ptr()
        if place:
            name = self._names.setdefault((place, local.shape, local.stride(), local.dtype), name)
        self.setdefault(name, tensor)
        return name


def split_tensors(tree: object, name: str, tensors: SplitTensors) -> Any:
    """The tree as JSON holds it; its tensors go to `tensors` by the path to them.

    Raises UsageError for what is neither a number, text, a container of those, nor a tensor.
    """
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or tree.is_meta or tree.is_quantized:
            what = "meta" if tree.is_meta else "quantized" if tree.is_quantized else str(tree.layout)
            raise UsageError(
                f"'{name}' is a tensor of the kind {what}; a checkpoint holds dense ones with numbers in them"
            )
        return {_TENSOR: tensors.add(name, tree)}
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {_FLOAT: str(tree)}
    if isinstance(tree, Mapping):
        if all(type(key) is str and not key.startswith("__") for key in tree):
            return {key: split_tensors(value, f"{name}/{key}", tensors) for key, value in tree.items()}
        pairs = [(split_tensors(key, f"{name}/?", SplitTensors()), key, value) for key, value in tree.items()]
        return {_PAIRS: [[plain, split_tensors(value, f"{name}/{key}", tensors)] for plain, key, value in pairs]}
    if isinstance(tree, (list, tuple)):
        parts = [split_tensors(value, f"{name}/{number}", tensors) for number, value in enumerate(tree)]
        return parts if isinstance(tree, list) else {_TUPLE: parts}
    for kind in (int, float, str):  # of a subclass, as NumPy's floats and the members of an IntEnum are
        if isinstance(tree, kind):
            return split_tensors(kind(tree), name, tensors)
    if hasattr(tree, "item") and getattr(tree, "shape", None) == ():
        return tree.item()  # NumPy's other numbers
    raise UsageError(
        f"'{name}' is a {type(tree).__name__}; a checkpoint holds numbers, text, lists, mappings and tensors, since those load "
        "without running code; leave it out of the state_dict, or give the text or tensor that it can be made of"
    )


def join_tensors(plain: Any, tensor: Callable[[str], object]) -> Any:
    """The tree that `split_tensors` was given, with what `tensor` returns for the names of its tensors."""
    if isinstance(plain, list):
        return [join_tensors(value, tensor) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensor(plain[_TENSOR])
    if _FLOAT in plain:
        return float(plain[_FLOAT])
    if _PAIRS in plain:
        return {join_tensors(key, tensor): join_tensors(value, tensor) for key, value in plain[_PAIRS]}
    if _TUPLE in plain:
        return tuple(join_tensors(value, tensor) for value in plain[_TUPLE])
    return {key: join_tensors(value, tensor) for key, value in plain.items()}


def plain_leaves(plain: Any, path: str) -> Iterator[tuple[str, str]]:
    """What is no tensor in a tree from `split_tensors`: the path to each value, and the value as JSON."""
    inner: list[tuple[Any, Any]]
    if isinstance(plain, dict) and _PAIRS in plain:
        inner = [(json.dumps(key) if isinstance(key, dict) else key, value) for key, value in plain[_PAIRS]]
    elif isinstance(plain, dict) and _TUPLE in plain:
        inner = list(enumerate(plain[_TUPLE]))
    elif isinstance(plain, (dict, list)):
        inner = list(plain.items() if isinstance(plain, dict) else enumerate(plain))
    else:
        yield path, json.dumps(plain)
        return
    for key, value in inner:
        if key != _TENSOR:
            yield from plain_leaves(value, f"{path}/{key}")


def united_entries(ranks: Iterable[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """The tensors of several ranks as one whole: all their chunks, but of those with the same place the first alone."""
    found: dict[str, TensorEntry] = {}
    for entries in ranks:
        for name, entry in entries.items():
            chunks = found[name].chunks if name in found else ()
            places = {(c.offset, c.shape) for c in chunks}
            new = tuple(c for c in entry.chunks if (c.offset, c.shape) not in places)
            found[name] = msgspec.structs.replace(entry, chunks=chunks + new)
    return found


# -- writing -----------------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path, file: str, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]
) -> FileSum:
    """One rank's file, on the disk when this returns; of contiguous tensors of the CPU.

    Given as addresses, so that nothing is copied and the interpreter is free for other threads.
    """
    sharding = {name: {"saved_offsets": list(offsets[name])} for name in tensors}
    contents = {
        name: TensorSpec(
            dtype=torch_dtype_name(t.dtype),
            shape=list(t.shape),
            data_ptr=t.data_ptr(),
            data_len=t.numel() * t.element_size(),
        )
        for name, t in tensors.items()
    }
    serialize_file(contents, str(folder / file), {"format": "pt", _SHARDING: json.dumps(sharding)})
    sync_to_disk(folder / file)
    return sum_of(folder / file)


def publish(folder: Path, index: CheckpointIndex, writing: Path) -> None:
    """Make the checkpoint one, after all ranks have written: the index, then the name. One of the same step is replaced."""
    (writing / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
    sync_to_disk(writing / INDEX)
    sync_to_disk(writing)
    target, old = folder / f"{_PREFIX}{index.step}", folder / f".{_PREFIX}{index.step}.replaced"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    writing.rename(target)
    sync_to_disk(folder)
    shutil.rmtree(old, ignore_errors=True)


def writing_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint lies until it is one."""
    return folder / f".{_PREFIX}{step}.writing"


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint; it is none any more before the first of its files goes."""
    removed = folder / f".{_PREFIX}{step}.removed"
    shutil.rmtree(removed, ignore_errors=True)
    (folder / f"{_PREFIX}{step}").rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove what writers that were killed have left; put back what one was replacing."""
    for left in folder.glob(f".{_PREFIX}*.replaced"):
        target = folder / left.name[1 : -len(".replaced")]
        if not target.exists():
            left.rename(target)
    for ending in ("writing", "removed", "replaced"):
        for left in folder.glob(f".{_PREFIX}*.{ending}"):
            shutil.rmtree(left, ignore_errors=True)


def sum_of(path: Path) -> FileSum:
    """The checksum of a file as it is on the disk."""
    crc, size = 0, 0
    if not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return FileSum(num_bytes=size, crc32=crc)


# -- reading -----------------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct, frozen=True):
    step: int
    serial: int


def serials_in(folder: Path) -> list[tuple[int, int]]:
    """Serial and step of each checkpoint, in the order in which they were written; last those whose index cannot be read.

    Of a run that went on from an older one, the newest is not the one with the highest step.
    """
    found: list[tuple[int, int]] = []
    for path in folder.glob(f"{_PREFIX}*"):
        name = path.name.removeprefix(_PREFIX)
        if name.isdecimal() and (path / INDEX).is_file():
            try:
                serial = decode_json(read_regular_file(path / INDEX), _Head).serial
            except (OSError, RecordError):
                serial = UNREADABLE
            found.append((serial, int(name)))
    return sorted(found)


def read_index(path: Path) -> CheckpointIndex:
    """The index of a checkpoint's folder. Raises CheckpointError when there is none that can be read."""
    try:
        index = decode_json(read_regular_file(path / INDEX), CheckpointIndex)
    except OSError as e:
        raise CheckpointError(f"'{path}' has no {INDEX}: {e.strerror or e}") from e
    except RecordError as e:
        raise CheckpointError(f"'{path / INDEX}' is damaged: {e}") from e
    if index.version != _VERSION:
        raise CheckpointError(
            f"'{path}' is of version {index.version}, and this flatout reads {_VERSION}; read it with the one that wrote it"
        )
    try:
        check_index(index)
    except CheckpointError as e:
        raise CheckpointError(f"'{path / INDEX}' is damaged: {e}") from e
    return index


def check_index(index: CheckpointIndex) -> None:
    """Raises CheckpointError for tensors that are larger than the files they are in: nothing is allocated for a mere claim."""
    left = {name: file.num_bytes for name, file in index.files.items()}
    for name, entry in index.tensors.items():
        item_bytes = torch_dtype(entry.dtype).itemsize
        check_shape(entry.shape)
        for chunk in entry.chunks:
            check_shape(chunk.shape)
            ends = [a + n for a, n in zip(chunk.offset, chunk.shape, strict=False)]
            is_inside = len(chunk.offset) == len(chunk.shape) == len(entry.shape) and all(
                0 <= a <= end <= whole for a, end, whole in zip(chunk.offset, ends, entry.shape, strict=True)
            )
            if not is_inside:
                raise CheckpointError(f"a part of '{name}' is outside of it")
            left[chunk.file] = left.get(chunk.file, 0) - math.prod(chunk.shape) * item_bytes
            if left[chunk.file] < 0:
                raise CheckpointError(
                    f"'{name}' and others have more bytes than '{chunk.file[:80]}', which they are in"
                )


def check_shape(shape: Sequence[int]) -> None:
    """Raises CheckpointError for sizes that no tensor has."""
    if any(not 0 <= size < 1 << 63 for size in shape) or len(shape) > _MOST_DIMS or math.prod(shape) >= 1 << 60:
        raise CheckpointError(f"a tensor of the shape {str(list(shape[:8]))[:80]} does not exist")


def check_file(path: Path, file: str, wanted: FileSum) -> None:
    """Raises CheckpointError when a file is not what was written."""
    try:
        found = sum_of(path_inside(path, file))
    except OSError as e:
        raise CheckpointError(f"'{path / file}' cannot be read: {e.strerror or e}") from e
    if found != wanted:
        what = (
            f"{found.num_bytes} bytes of {wanted.num_bytes}" if found.num_bytes != wanted.num_bytes else "other bytes"
        )
        raise CheckpointError(f"'{path / file}' is damaged: it holds {what} than were written")


def read_into_tensors(entry: TensorEntry, target: Tensor, offset: Sequence[int], fetch: Fetch) -> None:
    """Fill `target`, the part of the tensor that begins at `offset`, from whatever chunks hold it. Raises CheckpointError."""
    filled = 0
    for chunk in entry.chunks:
        low = [max(a, b) for a, b in zip(offset, chunk.offset, strict=True)]
        high = [min(a + n, b + m) for a, n, b, m in zip(offset, target.shape, chunk.offset, chunk.shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, chunk.offset, strict=True))
        here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
        part = fetch(chunk, there)
        target[here].copy_(part)
        filled += part.numel()
    if filled < target.numel():
        raise CheckpointError(f"{filled} of {target.numel()} elements are there; it is not whole")


def fetch_chunk(path: Path, name: str, chunk: Chunk, there: tuple[slice, ...]) -> Tensor:
    """A piece of a chunk, from its file. Raises CheckpointError when that cannot be read."""
    try:
        with safe_open(path_inside(path, chunk.file), framework="pt") as file:
            part: Tensor = file.get_slice(name)[there] if there else file.get_tensor(name)
    except (OSError, SafetensorError, IndexError) as e:
        raise CheckpointError(f"'{path / chunk.file}' cannot be read: {e}") from e
    return part


def parallel_map(action: Callable[[Item], Value], items: Sequence[Item], *, num_bytes: int) -> list[Value]:
    """The results of `action` for each tensor or the like, in order: copying and checksums run without the interpreter's lock.

    `num_bytes` are those of all items; few are not worth threads.

    >>> parallel_map(abs, [-1, 2], num_bytes=16)
    [1, 2]
    """
    if num_bytes < _WORTH_BYTES:
        return [action(item) for item in items]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="parallel_map") as threads:
        return list(threads.map(action, items))


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls so. Raises CheckpointError where there is none."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"there is no dtype '{name[:40]}'")
    return found


def torch_dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in torch.

    >>> torch_dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
