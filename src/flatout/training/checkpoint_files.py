"""What a checkpoint is on disk: a folder of safetensors and one JSON, whole or not there; nothing in it is ever unpickled."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from flatout.errors import CheckpointError, UsageError

INDEX: Final = "checkpoint.json"
_VERSION: Final = 1
_TENSOR, _PAIRS, _TUPLE, _FLOAT = "__tensor__", "__pairs__", "__tuple__", "__float__"
_PREFIX: Final = "step-"
_SHARDING: Final = "DCP_SHARDING_INFO"
"""Where torch.distributed.checkpoint's reader of Hugging Face files looks for the offsets of shards (torch 2.7 and later)."""
_BLOCK: Final = 16 << 20
Fetch = Callable[["Chunk", tuple[slice, ...]], Tensor]
"""Gives a piece of a chunk."""
_UNREADABLE: Final = 1 << 60
"""Stands for the serial of a checkpoint whose index cannot be read."""


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a tensor: `shape` elements from `offset` on, in `file`; by `crc32` of its bytes a resume is proved."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int | None = None


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor as a whole: its dtype as torch names it, its shape, and the chunks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class FileSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By which a file is known to be whole: bytes, and CRC-32."""

    num_bytes: int
    crc32: int


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`checkpoint.json`. `serial` counts the checkpoints of a folder; `parts` has `{"__tensor__": name}` where tensors were."""

    version: int
    step: int
    serial: int
    num_ranks: int
    torch: str
    parts: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, FileSum]


# -- what is saved, as a tree ------------------------------------------------------------------------------------------------


def split(tree: object, name: str, tensors: dict[str, Tensor]) -> Any:
    """The tree as JSON holds it; its tensors go to `tensors` by the path to them.

    Raises UsageError for what is neither a number, text, a container of those, nor a tensor.
    """
    if isinstance(tree, Tensor):
        if tree.layout != torch.strided or tree.is_meta or tree.is_quantized:
            what = "meta" if tree.is_meta else "quantized" if tree.is_quantized else str(tree.layout)
            raise UsageError(
                f"'{name}' is a tensor of the kind {what}; a checkpoint holds dense ones with numbers in them"
            )
        tensors[name] = tree
        return {_TENSOR: name}
    if tree is None or type(tree) in (bool, int, str):
        return tree
    if type(tree) is float:
        return tree if math.isfinite(tree) else {_FLOAT: str(tree)}
    if isinstance(tree, Mapping):
        if all(type(key) is str and not key.startswith("__") for key in tree):
            return {key: split(value, f"{name}/{key}", tensors) for key, value in tree.items()}
        pairs = [(split(key, f"{name}/?", {}), key, value) for key, value in tree.items()]
        return {_PAIRS: [[plain, split(value, f"{name}/{key}", tensors)] for plain, key, value in pairs]}
    if isinstance(tree, (list, tuple)):
        parts = [split(value, f"{name}/{number}", tensors) for number, value in enumerate(tree)]
        return parts if isinstance(tree, list) else {_TUPLE: parts}
    for kind in (int, float, str):  # of a subclass, as NumPy's floats and the members of an IntEnum are
        if isinstance(tree, kind):
            return split(kind(tree), name, tensors)
    if hasattr(tree, "item") and getattr(tree, "shape", None) == ():
        return tree.item()  # NumPy's other numbers
    raise UsageError(
        f"'{name}' is a {type(tree).__name__}; a checkpoint holds numbers, text, lists, mappings and tensors, since those load "
        "without running code; leave it out of the state_dict, or give the text or tensor that it can be made of"
    )


def joined(plain: Any, tensor: Callable[[str], Tensor]) -> Any:
    """The tree that `split` was given, its tensors from `tensor`."""
    if isinstance(plain, list):
        return [joined(value, tensor) for value in plain]
    if not isinstance(plain, dict):
        return plain
    if _TENSOR in plain:
        return tensor(plain[_TENSOR])
    if _FLOAT in plain:
        return float(plain[_FLOAT])
    if _PAIRS in plain:
        return {joined(key, tensor): joined(value, tensor) for key, value in plain[_PAIRS]}
    if _TUPLE in plain:
        return tuple(joined(value, tensor) for value in plain[_TUPLE])
    return {key: joined(value, tensor) for key, value in plain.items()}


def renamed(plain: Any, names: Mapping[str, str]) -> Any:
    """The tree with its tensors under other names."""
    if isinstance(plain, list):
        return [renamed(value, names) for value in plain]
    if not isinstance(plain, dict):
        return plain
    return {key: names[value] if key == _TENSOR else renamed(value, names) for key, value in plain.items()}


def tensor_names(plain: Mapping[str, Any]) -> dict[str, str]:
    """Of a mapping as `split` returned it: where a tensor was, and by which name it was saved."""
    return {key: value[_TENSOR] for key, value in plain.items() if isinstance(value, dict) and _TENSOR in value}


def names_in(plain: Any) -> Iterator[str]:
    """Of the tensors of a tree as `split` returned it."""
    if isinstance(plain, dict) and _TENSOR in plain:
        yield plain[_TENSOR]
    elif isinstance(plain, (dict, list)):
        for value in plain.values() if isinstance(plain, dict) else plain:
            yield from names_in(value)


def is_tensor(plain: Mapping[str, Any]) -> bool:
    """Whether that is where a tensor was."""
    return _TENSOR in plain


def pairs_in(plain: Mapping[str, Any]) -> list[Any] | None:
    """Keys and values, of a mapping whose keys were not all text."""
    return plain.get(_PAIRS)


def tuple_in(plain: Mapping[str, Any]) -> list[Any] | None:
    """What a tuple held."""
    return plain.get(_TUPLE)


# -- writing -----------------------------------------------------------------------------------------------------------------


def write_tensors(
    folder: Path, file: str, tensors: Mapping[str, Tensor], offsets: Mapping[str, Sequence[int]]
) -> FileSum:
    """One rank's file, on the disk when this returns; of contiguous tensors of the CPU.

    Given as addresses, so that nothing is copied and the interpreter is free for other threads.
    """
    sharding = {name: {"saved_offsets": list(offsets[name])} for name in tensors}
    held = {
        name: TensorSpec(
            dtype=dtype_name(t.dtype),
            shape=list(t.shape),
            data_ptr=t.data_ptr(),
            data_len=t.numel() * t.element_size(),
        )
        for name, t in tensors.items()
    }
    serialize_file(held, str(folder / file), {"format": "pt", _SHARDING: json.dumps(sharding)})
    _to_disk(folder / file)
    return sum_of(folder / file)


def publish(folder: Path, index: Index, writing: Path) -> None:
    """Make the checkpoint one, after all ranks have written: the index, then the name. One of the same step is replaced."""
    (writing / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n")
    _to_disk(writing / INDEX)
    _to_disk(writing)
    target, old = folder / f"{_PREFIX}{index.step}", folder / f".{_PREFIX}{index.step}.replaced"
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    writing.rename(target)
    _to_disk(folder)
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
    for left in folder.glob(f".{_PREFIX}*.replaced") if folder.is_dir() else ():
        target = folder / left.name[1 : -len(".replaced")]
        if not target.exists():
            left.rename(target)
    for ending in ("writing", "removed", "replaced"):
        for left in folder.glob(f".{_PREFIX}*.{ending}") if folder.is_dir() else ():
            shutil.rmtree(left, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sum_of(path: Path) -> FileSum:
    """Of a file as it is on the disk."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc, size = zlib.crc32(block, crc), size + len(block)
    return FileSum(num_bytes=size, crc32=crc)


# -- reading -----------------------------------------------------------------------------------------------------------------


class _Head(msgspec.Struct, frozen=True):
    step: int
    serial: int


def steps_in(folder: Path) -> list[int]:
    """Steps of which there is a checkpoint, in the order in which they were written; last those whose index cannot be read.

    Of a run that went on from an older one, the newest is not the one with the highest step.
    """
    return [step for _, step in _serials_in(folder)]


def readable(folder: Path) -> list[int]:
    """Those of which the index can be read."""
    return [step for serial, step in _serials_in(folder) if serial < _UNREADABLE]


def next_serial(folder: Path) -> int:
    """Of the checkpoint that is written next."""
    return max((serial for serial, _ in _serials_in(folder) if serial < _UNREADABLE), default=0) + 1


def _serials_in(folder: Path) -> list[tuple[int, int]]:
    """Serial and step of each checkpoint, rising."""
    found: list[tuple[int, int]] = []
    for path in folder.glob(f"{_PREFIX}*") if folder.is_dir() else ():
        name = path.name.removeprefix(_PREFIX)
        if name.isdecimal() and (path / INDEX).is_file():
            try:
                serial = msgspec.json.decode((path / INDEX).read_bytes(), type=_Head).serial
            except (OSError, msgspec.DecodeError):
                serial = _UNREADABLE
            found.append((serial, int(name)))
    return sorted(found)


def read_index(path: Path) -> Index:
    """The index of a checkpoint's folder. Raises CheckpointError when there is none that can be read."""
    try:
        index = msgspec.json.decode((path / INDEX).read_bytes(), type=Index)
    except OSError as e:
        raise CheckpointError(f"'{path}' has no {INDEX}: {e.strerror or e}") from e
    except msgspec.DecodeError as e:
        raise CheckpointError(f"'{path / INDEX}' is damaged: {e}") from e
    if index.version != _VERSION:
        raise CheckpointError(
            f"'{path}' is of version {index.version}, and this flatout reads {_VERSION}; read it with the one that wrote it"
        )
    return index


def check_file(path: Path, file: str, wanted: FileSum) -> None:
    """Raises CheckpointError when a file is not what was written."""
    try:
        found = sum_of(path / file)
    except OSError as e:
        raise CheckpointError(f"'{path / file}' cannot be read: {e.strerror or e}") from e
    if found != wanted:
        what = (
            f"{found.num_bytes} bytes of {wanted.num_bytes}" if found.num_bytes != wanted.num_bytes else "other bytes"
        )
        raise CheckpointError(f"'{path / file}' is damaged: it holds {what} than were written")


def read_into(entry: Entry, target: Tensor, offset: Sequence[int], fetch: Fetch) -> None:
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


def fetched(path: Path, name: str, chunk: Chunk, there: tuple[slice, ...]) -> Tensor:
    """A piece of a chunk, from its file. Raises CheckpointError when that cannot be read."""
    try:
        with safe_open(path / chunk.file, framework="pt") as file:
            part: Tensor = file.get_slice(name)[there] if there else file.get_tensor(name)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"'{path / chunk.file}' cannot be read: {e}") from e
    return part


def tensor_sum(tensor: Tensor) -> int:
    """CRC-32 of the bytes of a dense tensor of the CPU, in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def dtype_name(dtype: torch.dtype) -> str:
    """As torch names it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
