"""Batches of a DataLoader made by threads of this process, for items whose making releases the interpreter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

Batch = TypeVar("Batch")


class Threads(Generic[Batch]):
    """Iterates over a map-style DataLoader without workers; `num_threads` threads make its batches, each a whole one.

    The batches, their order, and the random numbers that the loader itself draws are the same. Items must not depend on
    random numbers of a shared generator, and must be safe to make in several threads. Worth it where making them is reading,
    decoding or array work, which lets other threads run; there are no processes to start and nothing is copied between them.
    Attributes are the loader's.
    """

    def __init__(self, loader: DataLoader[Batch], num_threads: int = 2, *, ahead: int | None = None) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads} and must be at least 1")
        if loader.num_workers:
            raise ValueError(f"the loader has {loader.num_workers} worker processes; threads are for one without")
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise ValueError(
                "the loader does not collate batches of a map-style data set; threads have nothing to share"
            )
        self._loader = loader
        self._num_threads = num_threads
        self._ahead = 2 * num_threads if ahead is None else ahead

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        loader = self._loader
        torch.empty((), dtype=torch.int64).random_(
            generator=loader.generator
        )  # a DataLoader draws its workers' seed here
        assert loader.batch_sampler is not None
        return self._made(iter(loader.batch_sampler))

    def _made(self, indices: Iterator[list[int]]) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="loader")
        under_way: deque[Future[Batch]] = deque()
        try:
            for wanted in indices:
                under_way.append(pool.submit(self._batch, wanted))
                if len(under_way) > self._ahead:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, indices: list[int]) -> Batch:
        loader, dataset = self._loader, self._loader.dataset
        many = getattr(dataset, "__getitems__", None)  # as torch's own fetcher asks
        items = many(indices) if many is not None else [dataset[i] for i in indices]
        batch = loader.collate_fn(items)
        if loader.pin_memory and torch.cuda.is_available():
            from torch.utils.data._utils.pin_memory import pin_memory

            batch = pin_memory(batch)
        return batch  # type: ignore[no-any-return]
