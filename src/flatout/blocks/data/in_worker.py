"""A loader whose batches are made by one worker process, with the random numbers that they would have had without it.

Workers of a DataLoader draw from generators of their own, so that items with random crops, noise or negative samples are others
than before. One worker can go on with the generators of the process instead, and hand their state back with each batch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, NamedTuple, cast

import torch
from torch import Generator
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.blocks.data.prefetch import Batch, Wrapper, items_of
from flatout.core.errors import UsageError

_OWNERS: Final = {"random": "Python's", "numpy": "NumPy's", "torch": "PyTorch's"}
_END: Final = object()


class InWorker(Wrapper, Generic[Batch]):
    """Iterates over a map-style DataLoader without workers; one process beside this one makes its batches, `ahead` of them early.

    Batches, their order and all random numbers are the same: the process goes on with the global generators of Python, NumPy and
    PyTorch where they stand when an epoch begins, and after each batch those here stand where they would have stood. That
    cannot be where items and the steps between them draw from the same generator (dropout on a CPU, say, and crops by
    torchvision): the next batch is then an error, and nothing has been drawn otherwise.

    The process lives on from epoch to epoch, so that generators which the data set has of its own go on as well; it starts
    anew where attributes of the data set have been set meanwhile. Attributes are the loader's.

    >>> from torch.utils.data import TensorDataset
    >>> [batch.tolist() for [batch] in InWorker(DataLoader(TensorDataset(torch.arange(4)), 2))]
    [[0, 1], [2, 3]]

    Raises:
        ValueError: The loader has workers, or does not collate batches of a map-style data set.
        UsageError: While iterating: the steps draw from a generator that the items draw from.
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
        self._requests = _Requests()
        self._inner: DataLoader[Any] | None = None
        self._attributes: dict[str, object] = {}

    def __iter__(self) -> Iterator[Batch]:
        loader = self._wrapped
        indices = iter(loader.batch_sampler)
        torch.empty((), dtype=torch.int64).random_(
            generator=loader.generator
        )  # as a DataLoader draws its workers' seed
        return self._batches(indices)

    def _batches(self, indices: Iterator[list[Any]]) -> Iterator[Batch]:
        first = next(indices, _END)  # samplers draw here
        if first is _END:
            return
        stood = _states()
        self._requests.restart(stood, first, indices)
        for batch, moved in self._process():
            for name, state in moved.items():
                if _STATE_OF[name]() != stood[name]:
                    raise UsageError(
                        f"the items of {type(self._wrapped.dataset).__name__} draw from {_OWNERS[name]} generator, and so do the "
                        "steps between them: only without a worker are the numbers the same (InWorker)"
                    )
                _restore(name, state)
                stood[name] = state
            yield batch

    def _process(self) -> DataLoader[Any]:
        """The loader with the process; another one where the data set has been changed here since it began."""
        loader = self._wrapped
        attributes = _attributes(loader.dataset)
        if self._inner is None or attributes != self._attributes:
            self._attributes = attributes
            self._inner = DataLoader(
                _Items(loader.dataset, loader.collate_fn),
                batch_sampler=cast(Any, self._requests),
                collate_fn=_as_it_is,
                num_workers=1,
                prefetch_factor=self._ahead,
                persistent_workers=True,
                pin_memory=loader.pin_memory,
                generator=Generator(),  # its seed is drawn aside
            )
        return self._inner


class _Request(NamedTuple):
    """The items of a batch; and where the generators stand, before the first of an epoch."""

    indices: list[Any]
    states: dict[str, Any] | None


class _Requests:
    """What the process is asked for in this epoch."""

    def __init__(self) -> None:
        self._coming: Iterator[_Request] = iter(())

    def restart(self, states: dict[str, Any], first: Any, others: Iterator[list[Any]]) -> None:
        def coming() -> Iterator[_Request]:
            yield _Request(first, dict(states))
            for indices in others:
                yield _Request(indices, None)

        self._coming = coming()

    def __iter__(self) -> Iterator[_Request]:
        return self._coming


class _Items(Dataset[Any]):
    """The data set as the process reads it: a request in, a batch and the generators that it moved out."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._collate = collate
        self._stood: dict[str, Any] = {}

    def __getitems__(self, request: _Request) -> tuple[Any, dict[str, Any]]:
        if request.states is not None:
            for name, state in request.states.items():
                _restore(name, state)
            self._stood = request.states
        batch = self._collate(items_of(self._dataset, request.indices))
        stand = _states()
        moved = {name: state for name, state in stand.items() if state != self._stood.get(name)}
        self._stood = stand
        return batch, moved


def _as_it_is(batch: Any) -> Any:
    return batch


def _attributes(dataset: Any) -> dict[str, object]:
    """Numbers and words of a data set, and which objects it holds else."""
    plain = (int, float, str, bool, type(None))
    return {name: value if isinstance(value, plain) else id(value) for name, value in vars(dataset).items()}


def _numpy_state() -> Any:
    name, words, *others = sys.modules["numpy"].random.get_state()
    return (name, words.tobytes(), *others)


_STATE_OF: Final[dict[str, Callable[[], Any]]] = {
    "random": random.getstate,
    "numpy": _numpy_state,
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
}


def _states() -> dict[str, Any]:
    """Where the global generators stand, as what can be compared and sent."""
    return {name: state_of() for name, state_of in _STATE_OF.items() if name != "numpy" or name in sys.modules}


def _restore(name: str, state: Any) -> None:
    if name == "random":
        random.setstate(state)
    elif name == "torch":
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    else:
        numpy = sys.modules["numpy"]
        kind, words, *others = state
        numpy.random.set_state((kind, numpy.frombuffer(words, numpy.uint32), *others))
