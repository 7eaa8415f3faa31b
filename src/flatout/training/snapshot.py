"""A copy of a model's or an optimizer's state, made anew in the memory of the copy before."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

State = TypeVar("State")


def copied(state: State, *, into: object = None) -> State:
    """A copy of a nest of dicts, lists and tensors that shares nothing with it, as `copy.deepcopy` makes one.

    `into` is an earlier copy that nobody needs any more: where it is of the same make, its memory is written anew and it is what
    is returned. A tensor of it that the state has taken over meanwhile, as `Optimizer.load_state_dict` does, is not written to.

    >>> model = torch.nn.Linear(2, 2)
    >>> good = copied(model.state_dict())
    >>> copied(model.state_dict(), into=good) is good
    True
    """
    if not _is_alike(state, into):
        return copy.deepcopy(state)
    pairs: list[tuple[Tensor, Tensor]] = []
    taken: set[int] = set()
    _collect(state, taken)
    result = _refilled(state, into, pairs, taken)
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([old for old, _ in pairs], [new for _, new in pairs])
    return result  # type: ignore[no-any-return]


def _is_alike(new: Any, old: Any) -> bool:
    """Whether both are nests of the same containers, keys and lengths, and no container is in both."""
    if isinstance(new, (dict, list)) and new is old:
        return False
    if isinstance(new, dict):
        return type(new) is type(old) and list(new) == list(old) and all(_is_alike(v, old[k]) for k, v in new.items())
    if type(new) is list:
        return type(old) is list and len(new) == len(old) and all(map(_is_alike, new, old))
    return not isinstance(old, (dict, list))


def _collect(nest: Any, found: set[int]) -> None:
    """Addresses of the memory that the tensors of a nest lie in."""
    if isinstance(nest, Tensor):
        found.add(_address(nest))
    elif isinstance(nest, (dict, list)):
        for value in nest.values() if isinstance(nest, dict) else nest:
            _collect(value, found)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _refilled(new: Any, old: Any, pairs: list[tuple[Tensor, Tensor]], taken: set[int]) -> Any:
    """The old nest with new leaves; tensors whose memory can be kept come into `pairs`."""
    if isinstance(new, (dict, list)):
        for key, value in new.items() if isinstance(new, dict) else enumerate(new):
            old[key] = _refilled(value, old[key], pairs, taken)
        return old
    if isinstance(new, Tensor):
        if isinstance(old, Tensor) and _fits(new, old) and _address(old) not in taken:
            taken.add(_address(old))  # a second tensor of the nest that lies in the same memory gets its own
            pairs.append((old, new))
            return old
        return copy.deepcopy(new)
    return new if isinstance(new, (bool, int, float, str, type(None))) else copy.deepcopy(new)


def _fits(new: Tensor, old: Tensor) -> bool:
    """Whether the old tensor's memory can hold the new one, laid out as a copy of it would be."""
    plain = type(new) in (Tensor, torch.nn.Parameter) and type(new) is type(old) and new.layout == torch.strided
    alike = plain and old.layout == torch.strided and new.dtype == old.dtype and new.device == old.device
    is_same = alike and new.shape == old.shape and new.stride() == old.stride()
    return is_same and new.requires_grad == old.requires_grad
