"""A dataset that keeps what it has made, and hands out batches instead of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate


class KeptItems(Dataset[Any]):
    """Wraps a map-style dataset whose items come out the same each time.

    `__getitems__` returns a whole batch, collated as torch does by default; when all items have been made, it is cut out of
    tensors that hold them all.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._items: dict[int, Any] = {}
        self._whole: Any = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: int) -> Any:
        if index not in self._items:
            self._items[index] = self._dataset[index]
        return self._items[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        """The batch of these items."""
        if self._whole is None:
            batch = default_collate([self[i] for i in indices])
            if len(self._items) == len(self):
                self._whole = default_collate([self._items[i] for i in range(len(self))])
                self._items.clear()
            return batch
        return _cut(self._whole, torch.as_tensor(indices))


def as_made(batch: Any) -> Any:
    """Stands for a collate function where batches come out collated."""
    return batch


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
