"""Copies of a model's or an optimizer's state, made in the memory of the copy before, and of the random generators'."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatout.core.tensors.nests import tree_flatten

State = TypeVar("State")


def copied(state: State, *, into: object = None) -> State:
    """A copy of a nest of dicts, lists and tensors that shares nothing with it, as `copy.deepcopy` makes one.

    `into` is an earlier copy that nobody needs any more: where it is of the same make, the memory of its tensors is written anew.
    A tensor of it that the state has taken over meanwhile, as `Optimizer.load_state_dict` does, is not written to.

    >>> model = torch.nn.Linear(2, 2)
    >>> good = copied(model.state_dict())
    >>> copied(model.state_dict(), into=good)["weight"] is good["weight"]
    True
    """
    (new, make), (old, old_make) = tree_flatten(state), tree_flatten(into)
    written: dict[int, Tensor] = {}  # by identity of the tensor that is copied: what deepcopy then takes for its copy
    pairs: list[tuple[Tensor, Tensor]] = []
    taken = {_address(tensor) for tensor in new if isinstance(tensor, Tensor)}
    for tensor, memory in zip(new, old, strict=True) if make == old_make else ():
        is_pair = isinstance(tensor, Tensor) and isinstance(memory, Tensor) and id(tensor) not in written
        if is_pair and _fits(tensor, memory) and _address(memory) not in taken:
            taken.add(_address(memory))  # a second tensor that lies in the same memory gets its own
            written[id(tensor)] = memory
            pairs.append((memory, tensor))
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([memory for memory, _ in pairs], [tensor for _, tensor in pairs])
    return copy.deepcopy(state, {**written})


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _fits(new: Tensor, old: Tensor) -> bool:
    """Whether the old tensor's memory can hold the new one, laid out as a copy of it would be."""
    plain = type(new) in (Tensor, torch.nn.Parameter) and type(new) is type(old) and new.layout == torch.strided
    alike = plain and old.layout == torch.strided and new.dtype == old.dtype and new.device == old.device
    is_same = alike and new.shape == old.shape and new.stride() == old.stride()
    return is_same and new.requires_grad == old.requires_grad


def random_state() -> dict[str, Any]:
    """The state of every generator that a script may draw from: torch, its current GPU, Python, and NumPy if it is imported."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, torch.tensor(numbers), gauss), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.copy()), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put a state back, in the process it was taken in or another."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy  # it may be imported later only, and would then begin anew

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy(), *rest))
