"""The next batches are made by threads, and copied to the device, while the step runs; and what all that wraps another shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from flatout.core.tensors.nests import map_tensors, tensors_in


class Wrapper:
    """Has the length and the public attributes of what it wraps."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._wrapped, name)


def items_of(dataset: Any, indices: Sequence[Any]) -> Any:
    """These items of a dataset, in one call where it has `__getitems__`, as torch's own fetcher asks."""
    many = getattr(dataset, "__getitems__", None)
    return many(list(indices)) if many is not None else [dataset[i] for i in indices]


Batch = TypeVar("Batch")
_END: Final = object()
_SETTLED: Final = 8
"""Batches before times are taken: allocators grow and kernels are chosen in the first."""
_TIMED: Final = 16
_WORTH: Final = 0.005
"""Of the time between batches: what a copy aside has to hide to be worth its events and the host's work for them."""


class _Fetched(NamedTuple):
    """A batch and the event after which its copies are there, None where none is under way; `began`: of a copy that is timed."""

    batch: Any
    ready: torch.cuda.Event | None
    began: torch.cuda.Event | None


class Prefetch(Wrapper, Generic[Batch]):
    """Iterates over batches with `ahead` of them under way: a thread reads them and copies them to `device`.

    The batches come out in order, on the device, and are what the source made; an exception of the source comes out where its
    batch would have. On a CUDA device copies go from pinned memory on a stream of their own, and the caller's stream waits for
    them; what that hides is measured (`copies`), and where it is next to nothing, copies run in the caller's stream from then on.
    Without a device batches stay where they are and are only read ahead; with the device 'cpu' this does nothing.
    Attributes (`dataset`, `sampler`, `set_epoch`) are the source's.

    Reading ahead draws the source's random numbers earlier: a data set that draws from torch's global generator, and a model that
    does on the CPU, get them in another order. A loop that is left early has had up to `ahead` batches read for nothing.

    >>> list(Prefetch([1, 2, 3]))
    [1, 2, 3]
    """

    def __init__(
        self, batches: Iterable[Batch], device: torch.device | str | int | None = None, *, ahead: int = 2
    ) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead} and must be at least 1: one batch is made while another is used")
        super().__init__(batches)
        self._device = None if device is None else torch.device(device)
        self._ahead = ahead
        self._copier: Copier | None = None

    @property
    def copies(self) -> Copies | None:
        """What copying beside the step was worth; None before it was measured, and where nothing is copied to a CUDA device."""
        return self._copier.copies if self._copier is not None else None

    def __iter__(self) -> Iterator[Batch]:
        # here, not in the thread: a loader draws its seed when it is begun
        source: Iterator[Batch] = iter(self._wrapped)
        if self._device is not None and self._device.type == "cpu":
            return source
        return self._read_ahead(source)

    def _read_ahead(self, source: Iterator[Batch]) -> Iterator[Batch]:
        copier = self._copier = self._copier or Copier(self._device)
        pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        pending: deque[Future[Any]] = deque()
        try:
            pending.extend(pool.submit(copier.fetch, source) for _ in range(self._ahead))
            while (fetched := pending.popleft().result()) is not _END:
                pending.append(pool.submit(copier.fetch, source))
                yield copier.hand_over(fetched)
                del fetched  # its memory is free as soon as the caller lets go of it
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def copied_ahead(source: Iterator[Batch], copier: Copier, *, ahead: int = 2) -> Iterator[Batch]:
    """Batches on the device: `ahead` of them are made before the first is wanted, by the caller; only copies run beside it."""
    pending: deque[Any] = deque()
    for _ in range(ahead + 1):
        pending.append(copier.fetch(source))
    while (fetched := pending.popleft()) is not _END:
        yield copier.hand_over(fetched)
        del fetched
        pending.append(copier.fetch(source))


class Copies(NamedTuple):
    """What copying batches on a stream of its own was worth, a batch: medians of device seconds over `num` batches.

    `copy_s` a copy takes; for `stall_s` of it the caller's stream had nothing else to do; `between_s` from one batch to the next.
    """

    num: int
    copy_s: float
    stall_s: float
    between_s: float
    is_overlapped: bool
    """Whether copies still run aside; not where that hides less than half a percent of the time between batches."""

    @property
    def hidden(self) -> float:
        """The share of a copy that ran beside the step.

        >>> Copies(16, copy_s=4e-3, stall_s=1e-3, between_s=20e-3, is_overlapped=True).hidden
        0.75
        """
        return max(0.0, 1 - self.stall_s / self.copy_s) if self.copy_s else 0.0


class _Timed(NamedTuple):
    """The events of one batch: begin and end of its copy, then of the caller's wait for it."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    wanted: torch.cuda.Event
    granted: torch.cuda.Event


class Copier:
    """Copies batches to a device, in one thread or two: `fetch` begins a copy, `hand_over` gives the batch to the caller's
    stream.

    On a CUDA device from pinned memory, on a stream of its own. After some batches it takes the times of a few; if next to
    nothing is hidden, it copies in the caller's stream from then on, which costs the host less. Order and contents are the
    same.
    """

    def __init__(self, device: torch.device | None) -> None:
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda and device is not None and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # the thread has a current device of its own
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._is_overlapped = True
        self._num_fetched = 0
        self._timed: list[_Timed] = []
        self._copies: Copies | None = None

    @property
    def copies(self) -> Copies | None:
        """What was measured; None before that, and where nothing is copied to a CUDA device."""
        self._look()
        return self._copies

    def fetch(self, source: Iterator[Any]) -> Any:
        """The next batch with its copies begun, or _END."""
        batch = next(source, _END)
        if batch is _END or self._device is None:
            return batch if batch is _END else _Fetched(batch, None, None)
        if self._stream is None:
            return _Fetched(map_tensors(batch, lambda t: t.to(self._device)), None, None)
        batch = map_tensors(batch, _pinned)
        if not self._is_overlapped:
            return _Fetched(batch, None, None)
        is_timed = _SETTLED <= self._num_fetched < _SETTLED + _TIMED
        self._num_fetched += 1
        began = torch.cuda.Event(enable_timing=True) if is_timed else None
        ended = torch.cuda.Event(enable_timing=is_timed)
        with torch.cuda.stream(self._stream):
            if began is not None:
                began.record(self._stream)
            moved = map_tensors(batch, self._copied)
            ended.record(self._stream)
        return _Fetched(moved, ended, began)

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        return tensor.to(self._device, non_blocking=True)  # torch keeps the pinned memory until the copy is done

    def hand_over(self, fetched: _Fetched) -> Any:
        """The batch for the caller's stream, which waits for it; its memory is not reused before that stream is done."""
        if self._stream is None:
            return fetched.batch
        stream = torch.cuda.current_stream(self._device)
        if fetched.ready is None:
            return map_tensors(fetched.batch, self._copied)
        if fetched.began is None:
            stream.wait_event(fetched.ready)
            self._look()
        else:
            wanted, granted = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            wanted.record(stream)
            stream.wait_event(fetched.ready)
            granted.record(stream)
            self._timed.append(_Timed(fetched.began, fetched.ready, wanted, granted))
        for tensor in tensors_in(fetched.batch):
            if tensor.is_cuda:
                tensor.record_stream(stream)
        return fetched.batch

    def _look(self) -> None:
        """Take the times once they are all there; nobody waits for that."""
        if self._copies is not None or len(self._timed) < _TIMED or not self._timed[-1].granted.query():
            return
        timed, self._timed = self._timed, []
        copy_s = median(t.began.elapsed_time(t.ended) for t in timed) / 1e3
        stall_s = median(t.wanted.elapsed_time(t.granted) for t in timed) / 1e3
        between_s = median(a.wanted.elapsed_time(b.wanted) for a, b in pairwise(timed)) / 1e3
        self._is_overlapped = max(0.0, copy_s - stall_s) >= _WORTH * between_s
        self._copies = Copies(len(timed), copy_s, stall_s, between_s, self._is_overlapped)


def _pinned(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_pinned():
        return tensor
    is_expanded = 0 in tensor.stride()  # and has no memory of its own to be copied as it lies
    return (tensor.contiguous() if is_expanded else tensor).pin_memory()


class Threads(Wrapper, Generic[Batch]):
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
        super().__init__(loader)
        self._num_threads = num_threads
        self._ahead = 2 * num_threads if ahead is None else ahead

    def __iter__(self) -> Iterator[Batch]:
        loader = self._wrapped
        # a DataLoader draws its workers' seed here
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return self._built(iter(loader.batch_sampler))

    def _built(self, indices: Iterator[list[int]]) -> Iterator[Batch]:
        pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="loader")
        pending: deque[Future[Batch]] = deque()
        try:
            for wanted in indices:
                pending.append(pool.submit(self._batch, wanted))
                if len(pending) > self._ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batch(self, indices: list[int]) -> Batch:
        loader = self._wrapped
        batch = loader.collate_fn(items_of(loader.dataset, indices))
        if loader.pin_memory and torch.cuda.is_available():
            from torch.utils.data._utils.pin_memory import pin_memory

            batch = pin_memory(batch)
        return batch  # type: ignore[no-any-return]
