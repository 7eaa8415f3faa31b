"""Batches of a training set in an order that belongs to (seed, epoch): an epoch can be repeated, and entered in the middle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from flatout.blocks.data.epochs import key_from
from flatout.core.errors import UsageError

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
"""Of one call of a model: a tensor, or several; samples first."""


class Batch(NamedTuple):
    """`targets` None: the teacher alone is followed. `ids` [B] number the samples; a cache of the teacher needs them."""

    inputs: Inputs
    targets: Tensor | None = None
    ids: Tensor | None = None


@runtime_checkable
class Epochs(Protocol):
    """Batches that know which epoch they are of."""

    def __len__(self) -> int:
        """Number of batches in an epoch."""

    def epoch(self, number: int) -> Iterator[Batch]:
        """Those of one epoch, counted from 0; the same whenever it is asked."""


@runtime_checkable
class Counted(Protocol):
    """Anything with a length that can be gone through again: a list of batches, a DataLoader."""

    def __len__(self) -> int:
        """Number of batches in an epoch."""

    def __iter__(self) -> Iterator[object]:
        """Tuples (inputs, targets), (inputs, targets, ids) or `Batch`."""


Batches: TypeAlias = Epochs | Counted


class Shuffled:
    """Tensors with the samples first, shuffled anew in each epoch; the order depends on the seed and the epoch alone.

    The last samples of an epoch that fill no batch are left out of it; another epoch has others.

    >>> data = Shuffled(torch.arange(5), batch_size=2, seed=1)
    >>> len(data), [b.ids.tolist() for b in data.epoch(0)] == [b.ids.tolist() for b in data.epoch(0)]
    (2, True)
    """

    def __init__(self, inputs: Inputs, targets: Tensor | None = None, *, batch_size: int, seed: int = 0) -> None:
        self._inputs, self._targets = inputs, targets
        self._num = num_samples(inputs)
        if targets is not None and len(targets) != self._num:
            raise UsageError(f"{len(targets)} targets for {self._num} samples; give one for each")
        if not 0 < batch_size <= self._num:
            raise UsageError(f"batch_size {batch_size} with {self._num} samples; give 1 to {self._num}")
        self._batch_size, self._seed = batch_size, seed

    def __len__(self) -> int:
        return self._num // self._batch_size

    def epoch(self, number: int) -> Iterator[Batch]:
        """Batches of one epoch, counted from 0; the same whenever it is asked."""
        order = torch.randperm(self._num, generator=key_from(self._seed, number).generator())
        for at in range(len(self)):
            ids = order[at * self._batch_size : (at + 1) * self._batch_size]
            yield batch_of(self._inputs, self._targets, ids)


def in_order(inputs: Inputs, targets: Tensor | None = None, *, batch_size: int = 256) -> Iterator[Batch]:
    """All samples once, in their order; the last batch may be smaller."""
    for ids in torch.arange(num_samples(inputs)).split(batch_size):
        yield batch_of(inputs, targets, ids)


def batch_of(inputs: Inputs, targets: Tensor | None, ids: Tensor) -> Batch:
    """The samples of these numbers."""
    own = inputs[ids] if isinstance(inputs, Tensor) else tuple(x[ids] for x in inputs)
    return Batch(own, targets[ids] if targets is not None else None, ids)


def num_samples(inputs: Inputs) -> int:
    """Raises UsageError when tensors have unequal numbers of them."""
    sizes = {len(x) for x in as_tuple(inputs)}
    if len(sizes) != 1:
        raise UsageError(f"inputs have {sorted(sizes)} samples; the first dimension of all is the sample")
    return sizes.pop()


def as_tuple(inputs: Inputs) -> tuple[Tensor, ...]:
    """The arguments of a call."""
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)


def batches_of_epoch(batches: Batches, number: int) -> Iterator[Batch]:
    """The batches of one epoch. Raises UsageError for something that is no batch."""
    found: Iterable[object] = batches.epoch(number) if isinstance(batches, Epochs) else batches
    for batch in found:
        if isinstance(batch, Batch):
            yield batch
        elif isinstance(batch, (tuple, list)) and 2 <= len(batch) <= 3:
            yield Batch(*batch)
        else:
            raise UsageError(
                f"a batch is a {type(batch).__name__}; give (inputs, targets), (inputs, targets, ids) or Batch"
            )
