"""Planned batches made, collated and brought to the device, with random numbers of their own; stopped and resumed at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from time import perf_counter
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.blocks.data.epochs import EpochPlan, KeyedDataset, keyed_indices
from flatout.blocks.data.prefetch import Copier, Copies, Prefetch, Threads, Wrapper, copied_ahead
from flatout.blocks.data.ragged import collate_ragged, ragged
from flatout.blocks.data.rows import Rows, RowsOf, pack
from flatout.core.errors import UsageError
from flatout.core.runtime.cores import usable_cores
from flatout.core.runtime.worker_start import added_workers_start

Batch = TypeVar("Batch")
_STATE: Final = ("seed", "epoch", "step")
_TRIAL: Final = 16
"""Batches of a trial; the first quarter is not counted, while processes start and queues fill."""
_NO_COST: Final = 0.03
"""The share of the time of a step with its batch: what making it here may take before other backends are tried."""
_BETTER: Final = 0.97
"""The share of that time that another backend must not exceed to be worth its threads or processes."""


_Cut = Callable[[list[int], int | None], Any]
"""A batch of some indices, its samples no longer than so much."""


class LoaderBackend(NamedTuple):
    """This process, or how many threads or processes make batches."""

    kind: Literal["here", "threads", "processes"]
    num: int

    def __str__(self) -> str:
        return "this process" if self.kind == "here" else f"{self.num} {self.kind}"


class BackendTrial(NamedTuple):
    """The measurement of one backend: seconds from batch to batch, and of those the seconds of waiting for a batch."""

    backend: LoaderBackend
    batch_s: float
    wait_s: float


class BackendSelection:
    """Tries the backends, one trial each, and settles for one. With `fixed` there is nothing to select."""

    def __init__(self, fixed: LoaderBackend | None, *, has_threads: bool, num_cores: int = 0) -> None:
        self._has_threads = has_threads
        self._num_cores = num_cores or usable_cores()
        self._left: list[LoaderBackend] = []
        self.is_settled = fixed is not None
        """Whether there is nothing to try any more."""
        self.backend = fixed or LoaderBackend("here", 0)
        """The backend that is tried, or was selected."""
        self.trials: tuple[BackendTrial, ...] = ()
        """The trials so far."""

    def record(self, backend: LoaderBackend, batch_s: float, wait_s: float) -> None:
        """Record what a trial has measured, and select the next backend.

        >>> selection = BackendSelection(None, has_threads=False, num_cores=8)
        >>> selection.record(selection.backend, 0.025, 0.015)
        >>> str(selection.backend), selection.is_settled
        ('3 processes', False)
        >>> selection.record(selection.backend, 0.011, 0.001)
        >>> str(selection.backend), selection.is_settled
        ('3 processes', True)
        """
        self.trials = (*self.trials, BackendTrial(backend, batch_s, wait_s))
        if backend.kind == "here" and wait_s > _NO_COST * batch_s:
            enough = ceil(wait_s / max(batch_s - wait_s, 1e-9)) + 1
            num = max(1, min(self._num_cores, enough))
            self._left = [LoaderBackend("threads", num)] if self._has_threads else []
            self._left.append(LoaderBackend("processes", num))
        if self._left:
            self.backend = self._left.pop(0)
            return
        here, best = self.trials[0], min(self.trials, key=lambda t: t.batch_s)
        self.backend = best.backend if best.batch_s < _BETTER * here.batch_s else here.backend
        self.is_settled = True


class Feed(Generic[Batch]):
    """Iterates over the batches of one epoch of a plan, on `device`; the next iteration is the next epoch.

    Random numbers that items draw are keyed by (seed, epoch, sample), so that `workers` change nothing. With workers, processes
    make the batches, and a thread brings them to the device; without, they are made when they are asked for, in the caller's
    thread, and only their copies run ahead. Out of a tensor, a TensorDataset or a list of tensors they are cut at once, and no
    processes are started: a table's rows are stacked, a list's samples become Ragged. `collate` makes a batch of items:
    `collate_ragged` for `Batches` and `pack` for `Rows` if not given. Where the plan's `sizes` grow, items are asked for as
    `dataset[index, size]`, so that an image is decoded, or a text is cut, to the size of its step.

    With `workers="measured"` the first batches are made here, and, where that is a cost, the next by processes, and by threads
    if items draw no random numbers (`draws=False`): the fastest makes the rest, and `backend` and `trials` show which, and why.
    The batches are the same. On a GPU the host waits for it twice in each trial.

    `state_dict()` is three integers: the seed, the epoch, and the optimizer steps whose batches were all handed out. Save it
    after the optimizer has stepped; a feed that loads it goes on with the batches that follow, and reads none of those before.
    In the middle of an accumulation it is the state before it.
    """

    def __init__(
        self,
        dataset: Any,
        plan: EpochPlan[Any],
        *,
        collate: Callable[[Sequence[Any]], Batch] | None = None,
        device: torch.device | str | int = "cpu",
        workers: int | Literal["measured"] = 0,
        draws: bool = True,
        ahead: int = 2,
    ) -> None:
        is_measured = workers == "measured"
        if not (is_measured or (isinstance(workers, int) and workers >= 0)) or ahead < 1:
            raise UsageError(
                f"workers {workers!r} and ahead {ahead}: give 0 or more processes, or 'measured', and 1 or more batches ahead"
            )
        self._plan = plan
        self._device = torch.device(device)
        self._ahead = ahead
        self._num_samples = len(dataset)
        is_pinned = self._device.type == "cuda"
        is_cut = collate is None and not isinstance(plan, Rows)
        self._cut = _cutter(dataset, is_pinned=is_pinned) if is_cut else None
        is_drawn = draws and not isinstance(dataset, (Tensor, list, tuple))  # taking what is there draws nothing
        keyed = KeyedDataset(dataset, seed=plan.seed) if is_drawn else _Indexed(dataset)
        num = workers if isinstance(workers, int) else 0
        fixed = LoaderBackend("processes", num) if num else LoaderBackend("here", 0)
        is_open = is_measured and self._cut is None
        self._selection = BackendSelection(None if is_open else fixed, has_threads=not is_drawn)
        self._dataset: Any = RowsOf(keyed) if isinstance(plan, Rows) else keyed
        usual: Any = partial(pack, length=plan.length) if isinstance(plan, Rows) else collate_ragged
        self._collate: Callable[[Sequence[Any]], Batch] = collate if collate is not None else usual
        self._epoch = self._taken = 0
        self._loader: Iterable[Batch] | None = None
        self._copier: Copier | None = None

    @property
    def copies(self) -> Copies | None:
        """What copying batches beside the step is worth; None before it was measured, and where they are not on a CUDA device."""
        prefetch = self._loader if isinstance(self._loader, Prefetch) else self._copier
        return prefetch.copies if prefetch is not None else None

    @property
    def epoch(self) -> int:
        """The number of the epoch that is iterated over, or that comes next."""
        return self._epoch

    @property
    def step(self) -> int:
        """Optimizer steps of the epoch whose batches were all handed out."""
        return self._taken // self._plan.accumulate

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._plan.num_steps(self._epoch) * self._plan.accumulate

    def state_dict(self) -> dict[str, int]:
        """The state as three integers: seed, epoch, and steps done."""
        return {"seed": self._plan.seed, "epoch": self._epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there. Raises UsageError for a state of something else, or of another seed."""
        if any(type(state.get(name)) is not int for name in _STATE):
            raise UsageError(f"{dict(state)!r} is no state of a feed; it has the integers {', '.join(_STATE)}")
        if state["seed"] != self._plan.seed:
            raise UsageError(
                f"the state is of seed {state['seed']} and the plan of {self._plan.seed}; plan with the same seed to go on"
            )
        self._plan.set_epoch(state["epoch"], step=state["step"])
        self._epoch, self._taken = state["epoch"], state["step"] * self._plan.accumulate

    @property
    def backend(self) -> str:
        """What makes the batches now: 'this process', or so many threads or processes."""
        return str(self._selection.backend)

    @property
    def trials(self) -> tuple[BackendTrial, ...]:
        """The measurements by which the backend was selected."""
        return self._selection.trials

    def __iter__(self) -> Iterator[Batch]:
        accumulate = self._plan.accumulate
        self._taken = self.step * accumulate  # what was left within an accumulation begins it again
        while self.step < self._plan.num_steps(self._epoch):
            self._plan.set_epoch(self._epoch, step=self.step)
            if self._selection.is_settled:
                for batch in self._built(self._selection.backend):
                    self._taken += 1
                    yield batch
            else:
                yield from self._trial(self._selection.backend, accumulate)
        self._epoch, self._taken = self._epoch + 1, 0

    def _trial(self, backend: LoaderBackend, accumulate: int) -> Iterator[Batch]:
        """Yield some batches of whole steps, and measure their time."""
        num_all = min(_TRIAL // accumulate or 1, self._plan.num_steps(self._epoch)) * accumulate
        num_warm = num_all // 4
        batches = iter(self._built(backend))
        began_s = waited_s = 0.0
        for number in range(num_all):
            if number == num_warm:
                began_s, waited_s = self._now_s(), 0.0
            asked_s = perf_counter()
            batch = next(batches, None)
            waited_s += perf_counter() - asked_s
            if batch is None:
                return  # the epoch is over; the trial is begun again
            self._taken += 1
            yield batch
        num = num_all - num_warm
        self._selection.record(backend, (self._now_s() - began_s) / num, waited_s / num)
        if not (self._selection.is_settled and self._selection.backend.kind == "processes"):
            del batches
            self._loader = None

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return perf_counter()

    def _built(self, backend: LoaderBackend) -> Iterable[Batch]:
        if backend.kind == "processes" and self._cut is None:
            if self._loader is None:
                self._loader = self._with_prefetch(self._loader_of(backend.num))
            return self._loader
        if backend.kind == "threads":
            threads: Threads[Batch] = Threads(self._loader_of(0), backend.num)
            return self._with_prefetch(threads)
        if self._cut is not None:
            built: Iterator[Any] = (self._cut(indices, size) for indices, size in _with_sizes(self._plan))
        else:
            built = (
                self._collate([self._dataset[i] for i in indices])
                for indices in _Indices(self._plan, self._num_samples)
            )
        if self._device.type == "cpu":
            return built
        self._copier = self._copier or Copier(self._device)
        return copied_ahead(built, self._copier, ahead=self._ahead)

    def _loader_of(self, num: int) -> DataLoader[Batch]:
        return DataLoader(
            self._dataset,
            batch_sampler=_Indices(self._plan, self._num_samples),
            collate_fn=self._collate,
            num_workers=num,
            prefetch_factor=self._ahead if num else None,
            persistent_workers=bool(num),
            multiprocessing_context=added_workers_start() if num else None,
            generator=torch.Generator(),  # so that starting an epoch draws nothing of the script's
        )

    def _with_prefetch(self, loader: DataLoader[Batch] | Threads[Batch]) -> Iterable[Batch]:
        """The loader with a thread that brings its batches to the device."""
        return loader if self._device.type == "cpu" else Prefetch(loader, self._device, ahead=self._ahead)


# -- batches cut at once out of data in memory, and indices that carry their epoch and their size to data that are not ------


def _cutter(dataset: Any, *, is_pinned: bool) -> _Cut | None:
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


class _Indexed(Wrapper, Dataset[Any]):
    """Data whose items draw nothing, as a dataset whose indices may carry an epoch and a size."""

    def __getitem__(self, index: int | tuple[int, int]) -> Any:
        number, size = index if isinstance(index, tuple) else (index, None)
        source, sample = self._wrapped, number % len(self)
        if size is None:
            return source[sample]
        return source[sample][:size] if isinstance(source, (list, tuple)) else source[sample, size]


class _Indices:
    """A plan's micro-batches, their indices with their epoch and, where sizes grow, with the size of their step."""

    def __init__(self, plan: EpochPlan[Any], num_samples: int) -> None:
        self._plan = plan
        self._num_samples = num_samples

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[Any]]:
        keyed = partial(keyed_indices, epoch=self._plan.epoch, num_samples=self._num_samples)
        for batch, size in _with_sizes(self._plan):
            if isinstance(self._plan, Rows):
                yield [tuple(keyed(row)) for row in batch]
            else:
                yield keyed(batch) if size is None else [(i, size) for i in keyed(batch)]


def _with_sizes(plan: EpochPlan[Any]) -> Iterator[tuple[list[Any], int | None]]:
    """A plan's micro-batches and the sizes of their steps."""
    epoch, first = plan.epoch, plan.start * plan.accumulate
    for number, batch in enumerate(plan, start=first):
        yield batch, plan.size_at(number // plan.accumulate, epoch)
