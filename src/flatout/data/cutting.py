"""Batches cut at once out of data in memory, and indices that carry their epoch and their size to data that are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flatout.data.epochs import EpochPlan
from flatout.data.keyed import keyed_indices
from flatout.data.ragged import ragged
from flatout.data.rows import Rows
from flatout.errors import UsageError

Cut = Callable[[list[int], int | None], Any]
"""A batch of some indices, its samples no longer than so much."""


def cutter(dataset: Any, *, is_pinned: bool) -> Cut | None:
    """How a batch is cut out of data that are tensors in memory, into pinned memory at once; None for other data."""
    if isinstance(dataset, Tensor):
        return lambda indices, size: _rows(dataset, indices, size, is_pinned)
    if type(dataset) is TensorDataset:
        return lambda indices, size: tuple(_rows(t, indices, size, is_pinned) for t in dataset.tensors)
    if isinstance(dataset, list) and dataset and all(isinstance(s, Tensor) and s.dim() for s in dataset):
        is_mixed = len({s.dtype for s in dataset}) > 1  # then torch.cat knows what they become
        pin = is_pinned and not is_mixed and all(s.device.type == "cpu" for s in dataset)
        return lambda indices, size: ragged(
            [dataset[i] if size is None else dataset[i][:size] for i in indices], pin=pin
        )
    return None


def _rows(table: Tensor, indices: list[int], size: int | None, is_pinned: bool) -> Tensor:
    if size is not None:
        raise UsageError(
            "the rows of a table all have one size; give sizes for a list of tensors or a dataset of one's own"
        )
    wanted = torch.tensor(indices, device=table.device)
    if not is_pinned or table.device.type != "cpu":
        return table[wanted]
    rows = torch.empty((len(indices), *table.shape[1:]), dtype=table.dtype, pin_memory=True)
    return torch.index_select(table, 0, wanted, out=rows)


class Indexed(Dataset[Any]):
    """Data whose items draw nothing, as a dataset whose indices may carry an epoch and a size."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self._is_list = isinstance(held, (list, tuple))

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        number, size = index if isinstance(index, tuple) else (index, None)
        sample = number % len(self._held)
        if size is None:
            return self._held[sample]
        return self._held[sample][:size] if self._is_list else self._held[sample, size]


class Indices:
    """A plan's micro-batches, their indices with their epoch and, where sizes grow, with the size of their step."""

    def __init__(self, plan: EpochPlan[Any], num_samples: int) -> None:
        self._plan = plan
        self._num_samples = num_samples

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[Any]]:
        keyed = partial(keyed_indices, epoch=self._plan.epoch, num_samples=self._num_samples)
        for batch, size in with_sizes(self._plan):
            if isinstance(self._plan, Rows):
                yield [tuple(keyed(row)) for row in batch]
            else:
                yield keyed(batch) if size is None else [(i, size) for i in keyed(batch)]


def with_sizes(plan: EpochPlan[Any]) -> Iterator[tuple[list[Any], int | None]]:
    """A plan's micro-batches and the sizes of their steps."""
    epoch, first = plan.epoch, plan.start * plan.accumulate
    for number, batch in enumerate(plan, start=first):
        yield batch, plan.size_at(number // plan.accumulate, epoch)
