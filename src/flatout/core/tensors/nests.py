"""Nests: tensors in lists, tuples, mappings and dataclasses, as batches and arguments are.

This is the one place that imports torch's walk over nests (`torch.utils._pytree`); what others need of it they import from here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import is_dataclass
from typing import Any

from torch import Size, Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "map_tensors",
    "tensors_in",
    "tree_flatten",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_structure",
    "tree_unflatten",
]


def map_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The nest with each tensor changed; what is no tensor, list, tuple or mapping comes through as it is."""

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if isinstance(leaf, MutableMapping):  # a class of batches, which may hold more than its items
            whole = copy.copy(leaf)
            whole.update({key: map_tensors(value, change) for key, value in leaf.items()})
            return whole
        return leaf

    return tree_map(changed, nest, is_leaf=lambda leaf: isinstance(leaf, Size))


def tensors_in(nest: Any, *, depth: int = 4) -> Iterator[Tensor]:
    """All tensors of a nest, in order; at most `depth` dataclasses and containers of unusual classes deep."""
    for leaf in tree_iter(nest):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not depth:
            continue
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()), depth=depth - 1)
        elif isinstance(leaf, (list, tuple)):
            yield from tensors_in(list(leaf), depth=depth - 1)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in(vars(leaf), depth=depth - 1)
