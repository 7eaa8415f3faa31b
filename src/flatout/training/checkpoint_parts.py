"""What a checkpoint is of: modules, optimizers and other parts; their tensors, and how those lie over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatout.errors import CheckpointError, UsageError
from flatout.training import checkpoint_files as files
from flatout.training.checkpoint_files import Chunk, Entry, Index
from flatout.training.scattered import Scattered

RANDOM: Final = "random"
"""The part that random numbers are saved as."""
Fetch = Callable[[str, Chunk, tuple[slice, ...]], Tensor]
"""Gives a piece of a chunk of the tensor of that name."""


class Part(NamedTuple):
    """A tensor as this rank holds it: where it begins in the whole, and whether this rank writes it."""

    local: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    is_mine: bool


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


def state_of(part: Any) -> Any:
    if isinstance(part, Mapping):
        return dict(part)
    if not hasattr(part, "state_dict"):
        raise UsageError(f"a part is a {type(part).__name__}; give something with a state_dict, or a mapping")
    return bare(part).state_dict()


def weights_of(part: Any) -> list[str]:
    """Names of parameters, which are to be finite; a buffer may hold an infinity, as masks do."""
    if isinstance(part, Scattered):
        return part.weights()
    return [name for name, _ in bare(part).named_parameters()] if isinstance(part, nn.Module) else []


def first_of_twins(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of tensors that are the same memory, as tied weights are, the first; of others themselves."""
    first: dict[Any, str] = {}
    same: dict[str, str] = {}
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.data_ptr()
        same[name] = first.setdefault((place, local.shape, local.stride(), local.dtype), name) if place else name
    return same


def shard(tensor: DTensor) -> Part:
    """This rank's part of a DTensor; of ranks with the same part the first writes."""
    chunks = tensor.__create_chunk_list__()
    local = tensor.to_local()
    coordinate = tensor.device_mesh.get_coordinate()
    is_first = coordinate is not None and all(
        not placement.is_replicate() or at == 0 for placement, at in zip(tensor.placements, coordinate, strict=True)
    )
    offset = tuple(chunks[0].offsets) if chunks else (0,) * tensor.dim()
    return Part(local, offset, tuple(tensor.shape), is_first and local.numel() > 0)


def places(part: Any, name: str) -> Callable[[str], Tensor | None]:
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


def check_alike(name: str, part: Any, index: Index) -> None:
    """Raises UsageError when a module is not the one that was saved."""
    part = bare(part)
    if not isinstance(part, nn.Module):
        return
    kept = {n: index.tensors[t] for n, t in files.tensor_names(index.parts[name]).items()}
    here = {n: t for n, t in part.state_dict().items() if isinstance(t, Tensor)}
    for what, names in (("lacks", here.keys() - kept.keys()), ("has besides", kept.keys() - here.keys())):
        if names:
            raise UsageError(
                f"the checkpoint's '{name}' {what} {', '.join(sorted(names)[:4])} ({len(names)}); it is of another model"
            )
    for n, tensor in here.items():
        was = f"{list(kept[n].shape)} {kept[n].dtype}"
        now = f"{list(tensor.shape)} {files.dtype_name(tensor.dtype)}"
        if was != now:
            raise UsageError(f"'{name}/{n}' is {now}, and {was} in the checkpoint; it is of another model")


def states_of(index: Index, parts: Mapping[str, Any], path: Path | str, fetch: Fetch) -> dict[str, Any]:
    """The states that an index describes, by part, laid out as the parts are now. Nothing is changed.

    Raises UsageError when it is of other parts, CheckpointError when a tensor is not whole.
    """
    lacking, own = sorted(parts.keys() - index.parts.keys()), sorted(index.parts.keys() - {RANDOM})
    if lacking or not parts:
        raise UsageError(f"'{path}' has no parts {lacking}; it has {own}")
    fixed = sorted(name for name, part in parts.items() if not hasattr(part, "load_state_dict"))
    if fixed:
        raise UsageError(f"the parts {fixed} have no load_state_dict; give what the state is to go to")
    states = {}
    for name, part in parts.items():
        check_alike(name, part, index)
        place = places(part, name)

        def loaded(n: str, place: Callable[[str], Tensor | None] = place) -> Tensor:
            return _read(n, index.tensors[n], place(n), fetch)

        kept = part.own(index.parts[name]) if isinstance(part, Scattered) else index.parts[name]
        states[name] = files.joined(kept, loaded)
    return states


def numbers_of(index: Index, rank: int, fetch: Fetch) -> Any:
    """The state of one rank's random numbers; None when the index has none of it."""
    kept = index.parts[RANDOM].get(f"{rank}")
    return files.joined(kept, lambda n: _read(n, index.tensors[n], None, fetch)) if kept is not None else None


def _read(name: str, entry: Entry, place: Tensor | None, fetch: Fetch) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    whole: Tensor | None = None
    if isinstance(place, DTensor) and tuple(place.shape) == entry.shape:
        whole = torch.empty_like(place, dtype=dtype)
        assert isinstance(whole, DTensor)
        part = shard(whole)
        target, offset = part.local, part.offset
    else:
        whole = target = torch.empty(entry.shape, dtype=dtype)
        offset = (0,) * len(entry.shape)
    try:
        if target.numel():
            files.read_into(entry, target, offset, partial(fetch, name))
    except CheckpointError as e:
        raise CheckpointError(f"'{name}': {e}") from e
    return whole
