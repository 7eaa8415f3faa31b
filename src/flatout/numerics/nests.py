"""Nests: tensors in lists, tuples and mappings, as batches and arguments are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def mapped(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The nest with each tensor changed; what is no tensor, list, tuple or mapping is handed through as it is."""
    if isinstance(nest, Tensor):
        return change(nest)
    if type(nest) in (list, tuple):
        return type(nest)(mapped(v, change) for v in nest)
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(mapped(v, change) for v in nest))
    if type(nest) is dict:
        return {k: mapped(v, change) for k, v in nest.items()}
    if isinstance(nest, MutableMapping):  # keeps what a class of batches holds besides
        changed = copy.copy(nest)
        changed.update({k: mapped(v, change) for k, v in nest.items()})
        return changed
    return nest


def tensors_in(nest: Any) -> Iterator[Tensor]:
    """All tensors of a nest, in order."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (list, tuple)):
        for value in nest:
            yield from tensors_in(value)
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_in(value)
