"""Datasets that cache their items, and return items or whole batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from flatout.blocks.data.prefetch import Wrapper
from flatout.blocks.data.stored_images import stored_images


class CachedItems(Wrapper, Dataset[Any]):
    """Wraps a map-style dataset whose items come out the same each time: each is built once and cached.

    Lists and dicts are handed out as copies of their own, so that a collate function may fill them up.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._items: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._items:
            self._items[index] = self._wrapped[index]
        item = self._items[index]
        return copy.copy(item) if isinstance(item, (dict, list)) else item


class CachedBatches(Wrapper, Dataset[Any]):
    """Wraps a map-style dataset whose items come out the same each time, and hands out batches collated as torch does by default.

    For use with the collate function `identity_collate`. Once all items are there, a batch is cut out of tensors that hold them;
    the rows of a TensorDataset, and images that torchvision stores as one array, are cut out from the start.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset)
        self._items: dict[int, Any] = {}
        self._whole: Any = None
        self._is_ragged = self._is_begun = False

    def __getitem__(self, index: int) -> Any:
        if self._whole is not None:
            return self._wrapped[index]
        if index not in self._items:
            self._items[index] = self._wrapped[index]
        return self._items[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The batch of these items."""
        if not self._is_begun:
            self._is_begun = True
            images = stored_images(self._wrapped)
            self._whole = list(images) if images is not None else None
        if self._whole is not None:
            return _cut(self._whole, torch.as_tensor(indices))
        rows = _rows_of(self._wrapped, indices)
        if rows is not None:
            return rows
        batch = default_collate([self[i] for i in indices])
        if len(self._items) == len(self) and not self._is_ragged:
            self._keep_whole()
        return batch

    def _keep_whole(self) -> None:
        try:
            self._whole = default_collate([self._items[i] for i in range(len(self))])
        except RuntimeError:  # items of different sizes, alike within each batch
            self._is_ragged = True
        else:
            self._items.clear()


def identity_collate(batch: Any) -> Any:
    """Stands for a collate function where batches come out collated."""
    return batch


def _rows_of(dataset: Any, indices: Sequence[int]) -> list[Tensor] | None:
    """These rows of the tensors of a TensorDataset, or of a part of one; None for another dataset."""
    if type(dataset) is Subset:
        inside = dataset.indices
        return _rows_of(dataset.dataset, [inside[i] for i in indices])
    if type(dataset) is TensorDataset:
        rows = torch.as_tensor(indices)
        return [tensor[rows] for tensor in dataset.tensors]
    return None


def _cut(whole: Any, rows: Tensor) -> Any:
    """These rows of a nest of tensors; of lists of strings, those elements."""
    if isinstance(whole, Tensor):
        return whole[rows]
    if isinstance(whole, dict):
        return type(whole)({k: _cut(v, rows) for k, v in whole.items()})
    if isinstance(whole, (list, tuple)):
        if whole and isinstance(whole[0], (str, bytes)):
            return [whole[i] for i in rows.tolist()]
        parts = [_cut(v, rows) for v in whole]
        return type(whole)(*parts) if hasattr(whole, "_fields") else parts
    return whole
