"""What all plans of batches share: known from (seed, epoch, step), planned ahead; random numbers of samples; sizes that grow."""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count, islice
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from flatout.blocks.data.prefetch import Prefetch, Wrapper
from flatout.core.errors import UsageError
from flatout.machine.cost.batching import SampleCost


class Key(NamedTuple):
    """64 bits from which generators start."""

    number: int

    def generator(self) -> torch.Generator:
        """A new generator on the CPU."""
        return torch.Generator().manual_seed(self.number)


def key_from(*numbers: int) -> Key:
    """The key of some integers: BLAKE2b of them, so that no two of them (nor sums of them) start alike.

    >>> key_from(0, 1, 2) == key_from(0, 2, 1)
    False
    """
    text = ",".join(str(int(n)) for n in numbers)
    return Key(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)


class KeyedDataset(Wrapper, Dataset[Any]):
    """Wraps a map-style dataset whose items draw random numbers: those of an item depend on (seed, epoch, index) alone.

    While an item is made, the global generators of torch (CPU), random and NumPy start from its key; afterwards they are what
    they were. So the same augmentations come out for any number of worker processes and of ranks, and a run that is resumed draws
    what it would have drawn. Not for threads, which share those generators. The epoch comes with the index: an index i stands for
    sample i % len(self) in epoch i // len(self), as `keyed_indices` gives them; of a pair (index, size) the size is handed on.
    """

    def __init__(self, dataset: Any, *, seed: int = 0) -> None:
        super().__init__(dataset)
        self._seed = seed

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        index, size = index if isinstance(index, tuple) else (index, None)
        epoch, sample = divmod(index, len(self))
        with started_from(key_from(self._seed, epoch, sample)):
            return self._wrapped[sample] if size is None else self._wrapped[sample, size]


def keyed_indices(indices: Sequence[int], *, epoch: int, num_samples: int) -> list[int]:
    """Indices that carry their epoch to a `KeyedDataset` dataset of so many samples.

    >>> keyed_indices([0, 3], epoch=2, num_samples=10)
    [20, 23]
    """
    return [epoch * num_samples + i for i in indices]


@contextmanager
def started_from(key: Key) -> Iterator[None]:
    """The global generators of torch (CPU), random and NumPy start from a key, and are put back."""
    numpy = sys.modules.get("numpy")
    torch_state, random_state = torch.get_rng_state(), random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    torch.default_generator.manual_seed(key.number)
    random.seed(key.number)
    if numpy is not None:
        numpy.random.seed(key.number & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(random_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


Item = TypeVar("Item")

AHEAD: Final = 4
"""Steps that are planned before they are wanted."""


class EpochPlan(Sampler[list[Item]], ABC):
    """A `batch_sampler` that iterates over the micro-batches of one rank in one epoch, `accumulate` of them a step."""

    def __init__(
        self,
        lengths: Iterable[int] | Tensor,
        *,
        rank: int,
        num_ranks: int,
        accumulate: int,
        cost: SampleCost | None,
        seed: int,
    ) -> None:
        if num_ranks < 1 or accumulate < 1 or not 0 <= rank < num_ranks:
            raise UsageError(
                f"rank {rank} of {num_ranks}, accumulating {accumulate}: ranks count from 0, and both are 1 at least"
            )
        self._lengths: list[int] = lengths.tolist() if isinstance(lengths, Tensor) else [int(n) for n in lengths]
        self._rank, self._num_ranks = rank, num_ranks
        self._cost = cost if cost is not None else SampleCost()
        self.seed = seed
        """With the epoch and the step it determines every batch."""
        self.accumulate = accumulate
        """Micro-batches of an optimizer step."""
        self.epoch = 0
        """The number of the epoch that is iterated over next."""
        self.start = 0
        """The optimizer step that is iterated over first."""

    def size_at(self, number: int, epoch: int | None = None) -> int | None:
        """The size of samples in a step; None where they are as they are."""
        return None

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Iterate over this epoch next, from this optimizer step on: nothing is read or drawn for the steps before."""
        if epoch < 0 or not 0 <= step <= self.num_steps(epoch):
            raise UsageError(f"epoch {epoch}, step {step}: the epoch has steps 0 to {self.num_steps(max(0, epoch))}")
        self.epoch, self.start = epoch, step

    @abstractmethod
    def num_steps(self, epoch: int | None = None) -> int:
        """Optimizer steps of an epoch (the one that is iterated over next, if not given); epochs may differ by some."""

    def _steps_from_first(self, most: int) -> Iterator[tuple[int, int]]:
        """Steps (epoch, number) of the epochs from 0 on."""
        return islice(((e, n) for e in count() for n in range(self.num_steps(e))), most)

    @abstractmethod
    def _own(self, number: int, epoch: int) -> Iterable[list[Item]]:
        """This rank's micro-batches of one step."""

    def __len__(self) -> int:
        """The number of micro-batches of the next iteration."""
        return (self.num_steps() - self.start) * self.accumulate

    def __iter__(self) -> Iterator[list[Item]]:
        """Iterate over batches that a thread plans some steps ahead."""
        epoch, start = self.epoch, self.start
        steps = (self._own(number, epoch) for number in range(start, self.num_steps(epoch)))
        for micro_batches in Prefetch(steps, ahead=AHEAD):
            yield from micro_batches


Sizes = Callable[[float], int]
"""Of the epochs done, in parts of one; a pure function, so that a resumed run goes on with the size it had."""


def growing_sizes(low: int, high: int, *, epochs: float, start: float = 0.0, multiple: int = 1) -> Sizes:
    """`low` until `start` epochs are done, then in even steps up to `high`, which is reached `epochs` later.

    Sizes between the two are multiples of `multiple` (the patches of a vision transformer, the strides of a network, or what
    keeps the number of compiled shapes small), rounded down. Raises UsageError for sizes that do not grow.

    >>> size = growing_sizes(96, 224, epochs=4, multiple=32)
    >>> [size(done) for done in (0, 0.5, 1, 2, 3.9, 4, 10)]
    [96, 96, 128, 160, 192, 224, 224]
    """
    if not 1 <= low <= high or epochs <= 0 or start < 0 or multiple < 1:
        raise UsageError(
            f"from {low} to {high} within {epochs:g} epochs after {start:g}, multiples of {multiple}: sizes are 1 or more and "
            "grow, epochs are more than 0"
        )

    def size(done: float) -> int:
        part = (done - start) / epochs
        if part >= 1:
            return high
        return max(low, int(low + (high - low) * max(0.0, part)) // multiple * multiple)

    return size
