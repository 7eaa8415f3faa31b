"""A loader whose batches are made by one worker process, with the random numbers that they would have had without it.

Workers of a DataLoader draw from generators of their own, so that items with random crops, noise or negative samples are others
than before. One worker can go on with the generators of the process instead, and hand their state back with each batch.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Final, Generic, NamedTuple, cast

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.blocks.data.prefetch import Batch, Wrapper, items_of
from flatout.core.errors import UsageError
from flatout.core.runtime.worker_start import added_workers_start
from flatout.core.tensors.generators import generator_states, restore_generator

_OWNERS: Final = {"python": "Python's", "numpy": "NumPy's", "torch": "PyTorch's"}
_OFTEN: Final = 10
"""Batches made again before a warning."""


class InWorker(Wrapper, Generic[Batch]):
    """Iterates over a map-style DataLoader without workers; one process beside this one makes its batches, `ahead` of them early.

    Batches, their order and all random numbers are the same: the process goes on with the global generators of Python, NumPy and
    PyTorch where they stand when an epoch begins, and after each batch those here stand where they would have stood. Where the
    steps draw from a generator that the items draw from (dropout on a CPU, say, and crops by torchvision), batches that were made
    early are made again; where that happens often, a warning says that nothing is gained.

    The process lives on from epoch to epoch, so that generators which the data set has of its own go on as well, as far as no
    batch is made again and no epoch left early; it starts anew where attributes of the data set have been set meanwhile.
    Attributes are the loader's.

    >>> from torch.utils.data import TensorDataset
    >>> [batch.tolist() for [batch] in InWorker(DataLoader(TensorDataset(torch.arange(4)), 2))]
    [[0, 1], [2, 3]]

    Raises:
        ValueError: The loader has workers, or does not collate batches of a map-style data set.
        UsageError: While iterating: a sampler of the user's own draws batch by batch, and not when an epoch begins.
    """

    def __init__(self, loader: DataLoader[Batch], *, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead} and must be at least 1: one batch is made while another is used")
        if loader.num_workers:
            raise ValueError(f"the loader has {loader.num_workers} worker processes; this is for one without")
        if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
            raise ValueError("the loader does not collate batches of a map-style data set")
        super().__init__(loader)
        self._ahead = ahead
        self._asking = _Asking()
        self._inner: DataLoader[Any] | None = None
        self._attributes: dict[str, object] = {}
        self._num_again = 0

    def __iter__(self) -> Iterator[Batch]:
        loader = self._wrapped
        indices = iter(loader.batch_sampler)
        # as a DataLoader draws its workers' seed
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        return self._batches(indices)

    def _batches(self, indices: Iterator[list[Any]]) -> Iterator[Batch]:
        requests, left = _Requests(), indices
        while (first := next(left, None)) is not None:  # samplers draw when the first of an epoch is asked for
            stood = _states()
            requests.begin(stood, chain([first], left))
            self._asking.requests = requests
            for batch, moved in self._process():
                stand = _states()
                shared = [name for name in moved if stand[name] != stood[name]]
                if shared:  # the step has drawn in between, and so the batch is another
                    self._warn(shared[0])
                    break
                requests.drop_first()
                for name, state in moved.items():
                    restore_generator(name, state)
                    stood[name] = state
                yield batch
                if (
                    self._asking.requests is not requests
                ):  # the loader was begun again in between, and the process with it
                    break
            left = requests.left()

    def _warn(self, name: str) -> None:
        self._num_again += 1
        if self._num_again == _OFTEN:
            warnings.warn(
                f"the items of {type(self._wrapped.dataset).__name__} draw from {_OWNERS[name]} generator, and so do the steps "
                "between them: batches are made twice, and InWorker gains nothing here",
                stacklevel=4,
            )

    def _process(self) -> DataLoader[Any]:
        """The loader with the process; another one where the data set has been changed here since it began."""
        loader = self._wrapped
        attributes = _attributes(loader.dataset)
        if self._inner is None or attributes != self._attributes:
            self._attributes = attributes
            self._inner = DataLoader(
                _Items(loader.dataset, loader.collate_fn),
                batch_sampler=cast(Any, self._asking),
                collate_fn=_as_it_is,
                num_workers=1,
                prefetch_factor=self._ahead,
                persistent_workers=True,
                pin_memory=loader.pin_memory,
                multiprocessing_context=loader.multiprocessing_context or added_workers_start(),
                generator=Generator(),  # its seed is drawn aside
            )
        return self._inner


class _Request(NamedTuple):
    """The items of a batch; and where the generators stand, before the first of an epoch."""

    indices: list[Any]
    states: dict[str, Any] | None


class _Asking:
    """Stands for the sampler of the loader with the process: asks for the batches of the iteration that began last."""

    requests: _Requests

    def __iter__(self) -> Iterator[_Request]:
        return iter(self.requests)


class _Requests:
    """What the process is asked for, and what of that has not come out yet."""

    def __init__(self) -> None:
        self._asked: deque[list[Any]] = deque()
        self._coming: Iterator[list[Any]] = iter(())
        self._states: dict[str, Any] | None = None

    def begin(self, states: dict[str, Any], coming: Iterator[list[Any]]) -> None:
        """Ask for these batches, from where the generators stand."""
        self._asked.clear()
        self._coming, self._states = coming, dict(states)

    def __iter__(self) -> Iterator[_Request]:
        stand = _states()
        for indices in self._coming:
            moved = [name for name, state in _states().items() if state != stand.get(name, state)]
            if moved:
                raise UsageError(
                    f"the sampler draws from {_OWNERS[moved[0]]} generator batch by batch: asked for them early, it would draw "
                    "others (InWorker)"
                )
            self._asked.append(indices)
            states, self._states = self._states, None
            yield _Request(indices, states)
            stand = _states()

    def drop_first(self) -> None:
        """The first of those that were asked for has come out."""
        self._asked.popleft()

    def left(self) -> Iterator[list[Any]]:
        """The batches that have not come out."""
        return chain(tuple(self._asked), self._coming)


class _Items(Dataset[Any]):
    """The data set as the process reads it: a request in, a batch and the generators that it moved out."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        self._stood: dict[str, Any] = {}

    def __getitems__(self, request: _Request) -> tuple[Any, dict[str, Any]]:
        if request.states is not None:
            for name, state in request.states.items():
                restore_generator(name, state)
            self._stood = request.states
        batch = self._collate(items_of(self._dataset, request.indices))
        stand = _states()
        moved = {name: state for name, state in stand.items() if state != self._stood.get(name, state)}
        self._stood = stand
        return batch, moved


def _as_it_is(batch: Any) -> Any:
    return batch


def _attributes(dataset: Any) -> dict[str, object]:
    """Numbers and words of a data set, and which objects it holds else."""
    plain = (int, float, str, bool, type(None))
    attributes = getattr(dataset, "__dict__", {})  # a list has none
    return {name: value if isinstance(value, plain) else id(value) for name, value in attributes.items()}


def _states() -> dict[str, Any]:
    """Where the generators of the host stand."""
    states = generator_states()
    states.pop("cuda", None)  # items are made on the host
    return states
