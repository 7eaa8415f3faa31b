"""The next batches are read, and copied to the device, while the step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from flatout.data.nests import mapped, tensors_in

Batch = TypeVar("Batch")
_END: Final = object()


class _Fetched(NamedTuple):
    """A batch and the event after which its copies are there; None where nothing is under way."""

    batch: Any
    ready: torch.cuda.Event | None


class Prefetch(Generic[Batch]):
    """Iterates over batches with `ahead` of them under way: a thread reads them and copies them to `device`.

    The batches come out in order, on the device, and are what the source made; an exception of the source comes out where its
    batch would have. On a CUDA device copies go from pinned memory on a stream of their own, and the caller's stream waits for
    them. Without a device batches stay where they are and are only read ahead; with the device 'cpu' this does nothing.
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
        self._batches = batches
        self._device = None if device is None else torch.device(device)
        self._ahead = ahead

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Batch]:
        source = iter(self._batches)  # here, not in the thread: a loader draws its seed when it is begun
        if self._device is not None and self._device.type == "cpu":
            return source
        return self._read_ahead(source)

    def _read_ahead(self, source: Iterator[Batch]) -> Iterator[Batch]:
        copier = _Copier(self._device)
        pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        under_way: deque[Future[Any]] = deque()
        try:
            under_way.extend(pool.submit(copier.fetch, source) for _ in range(self._ahead))
            while (fetched := under_way.popleft().result()) is not _END:
                under_way.append(pool.submit(copier.fetch, source))
                yield copier.hand_over(fetched)
                del fetched  # its memory is free as soon as the caller lets go of it
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def copied_ahead(source: Iterator[Batch], device: torch.device, *, ahead: int = 2) -> Iterator[Batch]:
    """Batches on the device: `ahead` of them are made before the first is wanted, by the caller; only copies run beside it."""
    copier = _Copier(device)
    under_way: deque[Any] = deque()
    for _ in range(ahead + 1):
        under_way.append(copier.fetch(source))
    while (fetched := under_way.popleft()) is not _END:
        yield copier.hand_over(fetched)
        del fetched
        under_way.append(copier.fetch(source))


class _Copier:
    """Copies batches to a device, in a thread; hands them over in another."""

    def __init__(self, device: torch.device | None) -> None:
        is_cuda = device is not None and device.type == "cuda"
        if is_cuda and device is not None and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # the thread has a current device of its own
        self._device = device
        self._stream = torch.cuda.Stream(device) if is_cuda else None

    def fetch(self, source: Iterator[Any]) -> Any:
        """The next batch with its copies begun, or _END."""
        batch = next(source, _END)
        if batch is _END or self._device is None:
            return batch if batch is _END else _Fetched(batch, None)
        if self._stream is None:
            return _Fetched(mapped(batch, lambda t: t.to(self._device)), None)
        with torch.cuda.stream(self._stream):
            moved = mapped(batch, self._copied)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _Fetched(moved, event)

    def _copied(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        pinned = tensor if tensor.is_pinned() or tensor.layout != torch.strided else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)  # torch keeps the pinned memory until the copy is done

    def hand_over(self, fetched: _Fetched) -> Any:
        """The batch for the caller's stream, which waits for it; its memory is not given away before that stream is done."""
        if fetched.ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(fetched.ready)
            for tensor in tensors_in(fetched.batch):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return fetched.batch
