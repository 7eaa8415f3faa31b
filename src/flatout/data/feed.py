"""Planned batches made, collated and brought to the device, with random numbers of their own; stopped and resumed at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.data.epochs import EpochPlan
from flatout.data.keyed import Keyed, keyed_indices
from flatout.data.prefetch import Copier, Copies, Prefetch, copied_ahead
from flatout.data.ragged import collate_ragged, ragged
from flatout.data.rows import Rows, RowsOf, pack
from flatout.errors import UsageError

Batch = TypeVar("Batch")
_STATE: Final = ("seed", "epoch", "step")


class Feed(Generic[Batch]):
    """Iterates over the batches of one epoch of a plan, on `device`; the next iteration is the next epoch.

    Random numbers that items draw are keyed by (seed, epoch, sample), so that `workers` change nothing. With workers, processes
    make the batches, and a thread brings them to the device; without, they are made when they are asked for, in the caller's
    thread, and only their copies run ahead. Out of a tensor, a TensorDataset or a list of tensors they are cut at once, and no
    processes are started: a table's rows are stacked, a list's samples become Ragged. `collate` makes a batch of items:
    `collate_ragged` for `Batches` and `pack` for `Rows` if not given.

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
        workers: int = 0,
        ahead: int = 2,
    ) -> None:
        if workers < 0 or ahead < 1:
            raise UsageError(
                f"workers {workers} and ahead {ahead}: give 0 or more processes, and 1 or more batches ahead"
            )
        self._plan = plan
        self._device = torch.device(device)
        self._workers, self._ahead = workers, ahead
        self._num_samples = len(dataset)
        is_pinned = self._device.type == "cuda"
        self._cut = _cutter(dataset, is_pinned) if collate is None and not isinstance(plan, Rows) else None
        is_drawn = not isinstance(dataset, (Tensor, list, tuple))  # taking what is there draws nothing
        keyed = Keyed(dataset, seed=plan.seed) if is_drawn else _Indexed(dataset)
        self._dataset: Any = RowsOf(keyed) if isinstance(plan, Rows) else keyed
        usual: Any = partial(pack, length=plan.length) if isinstance(plan, Rows) else collate_ragged
        self._collate: Callable[[Sequence[Any]], Batch] = collate if collate is not None else usual
        self._epoch = self._taken = 0
        self._loader: DataLoader[Batch] | Prefetch[Batch] | None = None
        self._copier: Copier | None = None

    @property
    def copies(self) -> Copies | None:
        """What copying batches beside the step is worth; None before it was measured, and where they are not on a CUDA device."""
        held = self._loader if isinstance(self._loader, Prefetch) else self._copier
        return held.copies if held is not None else None

    @property
    def epoch(self) -> int:
        """That is iterated over, or next."""
        return self._epoch

    @property
    def step(self) -> int:
        """Optimizer steps of the epoch whose batches were all handed out."""
        return self._taken // self._plan.accumulate

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._plan.num_steps(self._epoch) * self._plan.accumulate

    def state_dict(self) -> dict[str, int]:
        """See above."""
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

    def __iter__(self) -> Iterator[Batch]:
        self._taken = self.step * self._plan.accumulate  # what was left within an accumulation begins it again
        self._plan.set_epoch(self._epoch, step=self.step)
        batches: Iterator[Batch] = self._here() if self._cut or not self._workers else iter(self._from_workers())
        for batch in batches:
            self._taken += 1
            yield batch
        self._epoch, self._taken = self._epoch + 1, 0

    def _here(self) -> Iterator[Batch]:
        if self._cut is not None:
            made: Iterator[Any] = map(self._cut, iter(self._plan))
        else:
            made = (self._collate(self._items(indices)) for indices in _Indices(self._plan, self._num_samples))
        if self._device.type == "cpu":
            return made
        self._copier = self._copier or Copier(self._device)
        return copied_ahead(made, self._copier, ahead=self._ahead)

    def _items(self, indices: list[Any]) -> list[Any]:
        return [self._dataset[i] for i in indices]

    def _from_workers(self) -> DataLoader[Batch] | Prefetch[Batch]:
        if self._loader is None:
            loader: DataLoader[Batch] = DataLoader(
                self._dataset,
                batch_sampler=_Indices(self._plan, self._num_samples),
                collate_fn=self._collate,
                num_workers=self._workers,
                prefetch_factor=self._ahead,
                persistent_workers=True,
                generator=torch.Generator(),  # so that starting an epoch draws nothing of the script's
            )
            on_cpu = self._device.type == "cpu"
            self._loader = loader if on_cpu else Prefetch(loader, self._device, ahead=self._ahead)
        return self._loader


def _cutter(dataset: Any, is_pinned: bool) -> Callable[[list[int]], Any] | None:
    """How a batch is cut out of data that are tensors in memory, into pinned memory at once; None for other data."""
    if isinstance(dataset, Tensor):
        return partial(_rows, dataset, is_pinned)
    if type(dataset) is TensorDataset:
        return lambda indices: tuple(_rows(t, is_pinned, indices) for t in dataset.tensors)
    if isinstance(dataset, list) and dataset and all(isinstance(s, Tensor) and s.dim() for s in dataset):
        is_mixed = len({s.dtype for s in dataset}) > 1  # then torch.cat knows what they become
        is_pinned = is_pinned and not is_mixed and all(s.device.type == "cpu" for s in dataset)
        return lambda indices: ragged([dataset[i] for i in indices], pin=is_pinned)
    return None


def _rows(table: Tensor, is_pinned: bool, indices: list[int]) -> Tensor:
    wanted = torch.tensor(indices, device=table.device)
    if not is_pinned or table.device.type != "cpu":
        return table[wanted]
    rows = torch.empty((len(indices), *table.shape[1:]), dtype=table.dtype, pin_memory=True)
    return torch.index_select(table, 0, wanted, out=rows)


class _Indexed(Dataset[Any]):
    """A tensor or a list as a dataset whose indices may carry an epoch."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __len__(self) -> int:
        return len(self._held)

    def __getitem__(self, index: int) -> Any:
        return self._held[index % len(self._held)]


class _Indices:
    """The plan's indices with their epoch."""

    def __init__(self, plan: EpochPlan[Any], num_samples: int) -> None:
        self._plan = plan
        self._num_samples = num_samples

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[list[Any]]:
        keyed = partial(keyed_indices, epoch=self._plan.epoch, num_samples=self._num_samples)
        for batch in self._plan:
            yield [tuple(keyed(row)) for row in batch] if isinstance(self._plan, Rows) else keyed(batch)
