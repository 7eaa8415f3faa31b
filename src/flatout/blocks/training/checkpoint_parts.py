"""What a checkpoint is of: modules, optimizers and other parts; their tensors, and how those lie over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatout.blocks.training import checkpoint_files as files
from flatout.blocks.training.checkpoint_files import CheckpointIndex, Chunk, TensorEntry
from flatout.blocks.training.snapshot import random_state, set_random_state
from flatout.core.errors import CheckpointError, UsageError

RANDOM: Final = "random"
"""The part that random numbers are saved as."""
Fetch = Callable[[str, Chunk, tuple[slice, ...]], Tensor]
"""Gives a piece of a chunk of the tensor of that name."""


class TensorPart(NamedTuple):
    """A tensor as this rank holds it: where it begins in the whole, and whether this rank writes it."""

    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_mine: bool
    is_shard: bool = False


class SplitState(NamedTuple):
    """A state split into what is plain, by part, and this rank's part of each tensor."""

    plain: dict[str, Any]
    tensors: dict[str, TensorPart]
    is_scattered: bool
    """Whether other ranks hold other names."""


class LoadedState(NamedTuple):
    """What was read of a checkpoint: the state of each part, and this rank's random numbers; None of another number of ranks."""

    states: dict[str, Any]
    random_numbers: Any

    def load_into(self, parts: Mapping[str, Any]) -> None:
        """Load the states, and put the random numbers back."""
        for name, part in parts.items():
            bare(part).load_state_dict(self.states[name])
        if self.random_numbers is not None:
            set_random_state(self.random_numbers)


@runtime_checkable
class Scattered(Protocol):
    """A part whose `state_dict` has this rank's names alone; the checkpoint has those of all."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `own` has left, with its tensors."""

    def places(self) -> Mapping[str, Tensor]:
        """Tensors that are divided as loaded ones are to be, by name."""

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of all ranks' state that this rank holds. Raises UsageError when something of it is missing."""

    def writes(self, name: str, *, is_shard: bool) -> bool:
        """Whether this rank writes its part of a tensor, which other ranks may hold, too."""

    def weights(self) -> list[str]:
        """The names of the tensors that must be finite."""


def bare(part: Any) -> Any:
    """A module without what replicates or compiles it, whose names are not those of its parameters."""
    while isinstance(part, nn.Module):
        inner = getattr(part, "_orig_mod", None)
        if inner is None and isinstance(part, nn.parallel.DistributedDataParallel):
            inner = part.module
        if inner is None:
            break
        part = inner
    return part


def check_saved(step: int, parts: Mapping[str, Any]) -> None:
    """Raises UsageError for a step or parts that cannot be saved."""
    if type(step) is not int or step < 0 or not parts or RANDOM in parts:
        raise UsageError(
            f"step {step!r}, parts {sorted(parts)}: give the number of steps done, and one part or more, "
            f"none of them named '{RANDOM}'"
        )


def split_state(parts: Mapping[str, Any], rank: int) -> SplitState:
    """Split the state of the parts and of the random numbers; nothing is copied.

    Raises UsageError for states that hold something else than numbers, text and tensors.
    """
    tensors = files.SplitTensors()
    plain = {name: files.split_tensors(_state_of(part), name, tensors) for name, part in parts.items()}
    plain[RANDOM] = {f"{rank}": files.split_tensors(random_state(), f"{RANDOM}/{rank}", tensors)}
    local_parts = {name: _part_of(tensor) for name, tensor in tensors.items()}
    return SplitState(plain, local_parts, any(isinstance(part, Scattered) for part in parts.values()))


def _state_of(part: Any) -> Any:
    if isinstance(part, Mapping):
        return dict(part)
    if not hasattr(part, "state_dict"):
        raise UsageError(f"a part is a {type(part).__name__}; give something with a state_dict, or a mapping")
    return bare(part).state_dict()


def weight_names(part: Any) -> list[str]:
    """Names of parameters, which are to be finite; a buffer may hold an infinity, as masks do."""
    if isinstance(part, Scattered):
        return part.weights()
    return [name for name, _ in bare(part).named_parameters()] if isinstance(part, nn.Module) else []


def _part_of(tensor: Tensor) -> TensorPart:
    """The part of a tensor that this rank holds; of ranks with the same part of a DTensor the first writes."""
    if not isinstance(tensor, DTensor):
        return TensorPart(tensor, (0,) * tensor.dim(), tuple(tensor.shape), is_mine=True)
    chunks = tensor.__create_chunk_list__()
    local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    is_first = coordinate is not None and all(
        not placement.is_replicate() or at == 0 for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    offset = tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()
    return TensorPart(local, offset, tuple(tensor.shape), is_first and local.numel() > 0, is_shard=True)


def _tensor_places(part: Any, name: str) -> Callable[[str], Tensor | None]:
    """What says how a loaded tensor of the part is to lie: a module's own, and for an optimizer's state its parameter."""
    if isinstance(part, Scattered):
        return {f"{name}/{n}": t for n, t in part.places().items()}.get
    part = bare(part)
    if isinstance(part, nn.Module):
        return {f"{name}/{n}": t for n, t in part.state_dict().items() if isinstance(t, Tensor)}.get
    if not isinstance(part, torch.optim.Optimizer):
        return lambda _: None
    params = {f"{n}": p for n, p in enumerate(p for group in part.param_groups for p in group["params"])}
    return lambda n: params.get(n.removeprefix(f"{name}/state/").partition("/")[0])


def _check_alike(name: str, part: Any, index: CheckpointIndex) -> None:
    """Raises UsageError when a module is not the one that was saved."""
    part = bare(part)
    if not isinstance(part, nn.Module):
        return
    entries = files.join_tensors(index.parts[name], index.tensors.__getitem__)
    saved = {n: entry for n, entry in entries.items() if isinstance(entry, TensorEntry)}
    here = {n: t for n, t in part.state_dict().items() if isinstance(t, Tensor)}
    for what, names in (("lacks", here.keys() - saved.keys()), ("has besides", saved.keys() - here.keys())):
        if names:
            raise UsageError(
                f"the checkpoint's '{name}' {what} {', '.join(sorted(names)[:4])} ({len(names)}); it is of another model"
            )
    for n, tensor in here.items():
        was = f"{list(saved[n].shape)} {saved[n].dtype}"
        now = f"{list(tensor.shape)} {files.torch_dtype_name(tensor.dtype)}"
        if was != now:
            raise UsageError(f"'{name}/{n}' is {now}, and {was} in the checkpoint; it is of another model")


def read_state(
    index: CheckpointIndex, parts: Mapping[str, Any], path: Path | str, fetch: Fetch, *, rank: int, num_ranks: int
) -> LoadedState:
    """The states that an index describes, by part, laid out as the parts are now on one of `num_ranks` ranks. Nothing is changed.

    Random numbers are read where there were as many ranks. Raises UsageError when it is of other parts, CheckpointError when a
    tensor is not whole.
    """
    lacking, own = sorted(parts.keys() - index.parts.keys()), sorted(index.parts.keys() - {RANDOM})
    if lacking or not parts:
        raise UsageError(f"'{path}' has no parts {lacking}; it has {own}")
    fixed = sorted(name for name, part in parts.items() if not hasattr(part, "load_state_dict"))
    if fixed:
        raise UsageError(f"the parts {fixed} have no load_state_dict; give what the state is to go to")
    states = {}
    for name, part in parts.items():
        _check_alike(name, part, index)
        place = _tensor_places(part, name)

        def loaded(n: str, place: Callable[[str], Tensor | None] = place) -> Tensor:
            return _read(n, index.tensors[n], place(n), fetch)

        saved = part.own(index.parts[name]) if isinstance(part, Scattered) else index.parts[name]
        states[name] = files.join_tensors(saved, loaded)
    numbers = index.parts[RANDOM].get(f"{rank}") if index.num_ranks == num_ranks else None
    if numbers is not None:
        numbers = files.join_tensors(numbers, lambda n: _read(n, index.tensors[n], None, fetch))
    return LoadedState(states, numbers)


def _read(name: str, entry: TensorEntry, place: Tensor | None, fetch: Fetch) -> Tensor:
    dtype = files.torch_dtype(entry.dtype)
    whole: Tensor | None = None
    if isinstance(place, DTensor) and tuple(place.shape) == entry.shape:
        whole = torch.empty_like(place, dtype=dtype)
        assert isinstance(whole, DTensor)
        part = _part_of(whole)
        target, offset = part.local, part.offset
    else:
        num_there = sum(math.prod(chunk.shape) for chunk in entry.chunks)
        if num_there < math.prod(entry.shape):  # before memory is taken for it
            raise CheckpointError(
                f"'{name}': {num_there} of {math.prod(entry.shape)} elements are there; it is not whole"
            )
        whole = target = torch.empty(entry.shape, dtype=dtype)
        offset = (0,) * len(entry.shape)
    try:
        if target.numel():
            files.read_into_tensors(entry, target, offset, partial(fetch, name))
    except CheckpointError as e:
        raise CheckpointError(f"'{name}': {e}") from e
    return whole


def unite_parts(states: list[Any]) -> Any:
    """The union of nests of mappings: the keys of all, and the first value of each.

    >>> unite_parts([{"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}])
    {'a': {'b': 1, 'c': 3}}
    """
    first = states[0]
    if not isinstance(first, Mapping):
        return first
    found: dict[str, Any] = {}
    for state in (one for one in states if isinstance(one, Mapping)):
        for key, value in state.items():
            found[key] = unite_parts([found[key], value]) if key in found else value
    return found
