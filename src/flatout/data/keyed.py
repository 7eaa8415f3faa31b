"""Random numbers that belong to a sample, not to the process that happens to make it: keyed by (seed, epoch, sample)."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset


class Key(NamedTuple):
    """64 bits from which generators start."""

    number: int

    def generator(self) -> torch.Generator:
        """A new generator on the CPU."""
        return torch.Generator().manual_seed(self.number)


def key_of(*numbers: int) -> Key:
    """The key of some integers: BLAKE2b of them, so that no two of them (nor sums of them) start alike.

    >>> key_of(0, 1, 2) == key_of(0, 2, 1)
    False
    """
    text = ",".join(str(int(n)) for n in numbers)
    return Key(int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1)


class Keyed(Dataset[Any]):
    """Wraps a map-style dataset whose items draw random numbers: those of an item depend on (seed, epoch, index) alone.

    While an item is made, the global generators of torch (CPU), random and NumPy start from its key; afterwards they are what
    they were. So the same augmentations come out for any number of worker processes and of ranks, and a run that is resumed draws
    what it would have drawn. Not for threads, which share those generators. The epoch comes with the index: an index i stands for
    sample i % len(self) in epoch i // len(self), as `keyed_indices` gives them; of a pair (index, size) the size is handed on.
    """

    def __init__(self, dataset: Any, *, seed: int = 0) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        index, size = index if isinstance(index, tuple) else (index, None)
        epoch, sample = divmod(index, len(self))
        with started_from(key_of(self._seed, epoch, sample)):
            return self._dataset[sample] if size is None else self._dataset[sample, size]


def keyed_indices(indices: Sequence[int], *, epoch: int, num_samples: int) -> list[int]:
    """Indices that carry their epoch to a `Keyed` dataset of so many samples.

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
