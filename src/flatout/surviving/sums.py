"""Sums by which two states are known to be the same, and the first place where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from flatout.surviving.abreast import abreast
from flatout.training import checkpoint_files as files
from flatout.training.checkpoint_files import Index
from flatout.training.checkpoint_parts import RANDOM, Part, first_of_twins, shard, state_of
from flatout.training.random_state import random_state
from flatout.training.scattered import Scattered


class Picture(NamedTuple):
    """A state taken apart: what is plain, by part; this rank's part of each tensor; and which of them are one memory.

    `is_scattered`: other ranks hold other names.
    """

    plain: dict[str, Any]
    tensors: dict[str, Part]
    same: dict[str, str]
    is_scattered: bool


def picture(parts: Mapping[str, Any], rank: int) -> Picture:
    """Of the parts and of the random numbers as they are now; nothing is copied. Raises UsageError as `Checkpoints.save` does."""
    tensors: dict[str, Tensor] = {}
    plain = {name: files.split(state_of(part), name, tensors) for name, part in parts.items()}
    plain[RANDOM] = {f"{rank}": files.split(random_state(), f"{RANDOM}/{rank}", tensors)}
    same = first_of_twins(tensors)
    held = {name: part_of(tensor) for name, tensor in tensors.items() if same[name] == name}
    is_scattered = any(isinstance(part, Scattered) for part in parts.values())
    return Picture(files.renamed(plain, same), held, same, is_scattered)


def part_of(tensor: Tensor) -> Part:
    """What of it this rank holds."""
    if isinstance(tensor, DTensor):
        return shard(tensor)
    return Part(tensor, (0,) * tensor.dim(), tuple(tensor.shape), is_mine=True)


def state_sums(**parts: Any) -> dict[str, str]:
    """A text for each tensor (this rank's part), number and text of the parts' states and of the random numbers, by its path.

    Two states are the same if their sums are: CRC-32 of a tensor's bytes with its dtype and shape, and other values as they are.
    Tensors of a device are copied to the host for it.

    >>> state_sums(lr={"now": 0.5})["lr/now"]
    '0.5'
    """
    return sums_of(picture(parts, 0))


def sums_of(taken: Picture) -> dict[str, str]:
    """The same of a picture."""
    here = [part.local for part in taken.tensors.values()]
    num_bytes = sum(t.numel() * t.element_size() for t in here)
    crcs = abreast(lambda t: files.tensor_sum(t.detach().cpu()), here, num_bytes=num_bytes)
    sums = plain_sums(taken.plain)
    for (name, part), crc in zip(taken.tensors.items(), crcs, strict=True):
        dtype = files.dtype_name(part.local.dtype)
        sums[_name(name)] = sum_text(dtype, tuple(part.local.shape), part.offset, crc)
    return sums


def kept_sums(index: Index, names: Mapping[str, Any], rank: int, live: Mapping[str, Part]) -> dict[str, str]:
    """What an index says of the parts of these names, as far as this rank lies as a rank did that saved it."""
    plain = {name: _own(part, index.parts[name]) for name, part in names.items()}
    numbers = index.parts[RANDOM].get(f"{rank}")
    if numbers is not None:
        plain[RANDOM] = {f"{rank}": numbers}
    sums = plain_sums(plain)
    here = set(files.names_in(plain))
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


def _own(part: Any, plain: Any) -> Any:
    """Of a part that is scattered, what this rank holds."""
    return part.own(plain) if isinstance(part, Scattered) else plain


ANY = "lies otherwise now"
"""In place of a sum that cannot be compared."""


def first_difference(one: Mapping[str, str], two: Mapping[str, str]) -> str | None:
    """The first place, in the order of `one`, where the states differ, in words; None where they are the same.

    >>> first_difference({"net/bias": "a", "step": "3"}, {"net/bias": "a", "step": "4"})
    'step differs: 3 was kept, and it is 4'
    """
    for name, kept in one.items():
        if name not in two:
            return f"{name} is missing; it was kept"
        if two[name] != kept and ANY not in (kept, two[name]):
            return f"{name} differs: {kept} was kept, and it is {two[name]}"
    return next((f"{name} was not kept, and it is there" for name in two if name not in one), None)


def sum_text(dtype: str, shape: tuple[int, ...], offset: tuple[int, ...], crc: int) -> str:
    """Of a tensor's part."""
    at = f" from {list(offset)}" if any(offset) else ""
    return f"{dtype} {list(shape)}{at} {crc:08x}"


def plain_sums(plain: Mapping[str, Any]) -> dict[str, str]:
    """Of what is no tensor, by path."""
    return {_name(path): text for name, tree in plain.items() for path, text in _leaves(tree, name)}


def _name(path: str) -> str:
    """Random numbers without the rank: they are this rank's own."""
    top, _, rest = path.partition("/")
    return f"{RANDOM}/{rest.partition('/')[2]}" if top == RANDOM else path


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{number}")
    elif not isinstance(tree, dict):
        yield path, json.dumps(tree)
    elif files.is_tensor(tree):
        pass
    elif (pairs := files.pairs_in(tree)) is not None:
        for key, value in pairs:
            yield from _leaves(value, f"{path}/{json.dumps(key) if isinstance(key, dict) else key}")
    elif (inner := files.tuple_in(tree)) is not None:
        yield from _leaves(inner, path)
    else:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}")
