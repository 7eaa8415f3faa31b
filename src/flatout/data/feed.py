"""Planned batches made, collated and brought to the device, with random numbers of their own; stopped and resumed at any step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any, Final, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flatout.data.choice import Choice, Tried, Way
from flatout.data.cutting import Indexed, Indices, cutter, with_sizes
from flatout.data.epochs import EpochPlan
from flatout.data.keyed import Keyed
from flatout.data.prefetch import Copier, Copies, Prefetch, copied_ahead
from flatout.data.ragged import collate_ragged
from flatout.data.rows import Rows, RowsOf, pack
from flatout.data.threads import Threads
from flatout.errors import UsageError

Batch = TypeVar("Batch")
_STATE: Final = ("seed", "epoch", "step")
_TRIAL: Final = 16
"""Batches of a trial; the first quarter is not counted, while processes start and queues fill."""


class Feed(Generic[Batch]):
    """Iterates over the batches of one epoch of a plan, on `device`; the next iteration is the next epoch.

    Random numbers that items draw are keyed by (seed, epoch, sample), so that `workers` change nothing. With workers, processes
    make the batches, and a thread brings them to the device; without, they are made when they are asked for, in the caller's
    thread, and only their copies run ahead. Out of a tensor, a TensorDataset or a list of tensors they are cut at once, and no
    processes are started: a table's rows are stacked, a list's samples become Ragged. `collate` makes a batch of items:
    `collate_ragged` for `Batches` and `pack` for `Rows` if not given. Where the plan's `sizes` grow, items are asked for as
    `dataset[index, size]`, so that an image is decoded, or a text is cut, to the size of its step.

    With `workers="measured"` the first batches are made here, and, where that is a cost, the next by processes, and by threads if
    items draw no random numbers (`draws=False`): the fastest of the ways makes the rest, and `made_by` and `tried` say which, and
    why. The batches are the same. On a GPU the host waits for it twice in each trial.

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
        self._cut = cutter(dataset, is_pinned=is_pinned) if is_cut else None
        is_drawn = draws and not isinstance(dataset, (Tensor, list, tuple))  # taking what is there draws nothing
        keyed = Keyed(dataset, seed=plan.seed) if is_drawn else Indexed(dataset)
        fixed = Way("processes", workers) if isinstance(workers, int) and workers else Way("here", 0)
        self._choice = Choice(None if is_measured and self._cut is None else fixed, has_threads=not is_drawn)
        self._dataset: Any = RowsOf(keyed) if isinstance(plan, Rows) else keyed
        usual: Any = partial(pack, length=plan.length) if isinstance(plan, Rows) else collate_ragged
        self._collate: Callable[[Sequence[Any]], Batch] = collate if collate is not None else usual
        self._epoch = self._taken = 0
        self._loader: Iterable[Batch] | None = None
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

    @property
    def made_by(self) -> str:
        """Who makes the batches now: 'this process', or so many threads or processes."""
        return str(self._choice.way)

    @property
    def tried(self) -> tuple[Tried, ...]:
        """What was measured to choose."""
        return self._choice.tried

    def __iter__(self) -> Iterator[Batch]:
        accumulate = self._plan.accumulate
        self._taken = self.step * accumulate  # what was left within an accumulation begins it again
        while self.step < self._plan.num_steps(self._epoch):
            self._plan.set_epoch(self._epoch, step=self.step)
            if self._choice.is_made:
                for batch in self._made(self._choice.way):
                    self._taken += 1
                    yield batch
            else:
                yield from self._trial(self._choice.way, accumulate)
        self._epoch, self._taken = self._epoch + 1, 0

    def _trial(self, way: Way, accumulate: int) -> Iterator[Batch]:
        """Some batches of whole steps, with a look at the clock."""
        num_all = min(_TRIAL // accumulate or 1, self._plan.num_steps(self._epoch)) * accumulate
        num_warm = num_all // 4
        batches = iter(self._made(way))
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
        self._choice.tell(way, (self._now_s() - began_s) / num, waited_s / num)
        if not (self._choice.is_made and self._choice.way.kind == "processes"):
            del batches
            self._loader = None

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return perf_counter()

    def _made(self, way: Way) -> Iterable[Batch]:
        if way.kind == "processes" and self._cut is None:
            return self._from_workers(way.num)
        if way.kind == "threads":
            threads: Threads[Batch] = Threads(self._loader_of(0), way.num)
            return self._aside(threads)
        if self._cut is not None:
            made: Iterator[Any] = (self._cut(indices, size) for indices, size in with_sizes(self._plan))
        else:
            made = (self._collate(self._items(indices)) for indices in Indices(self._plan, self._num_samples))
        if self._device.type == "cpu":
            return made
        self._copier = self._copier or Copier(self._device)
        return copied_ahead(made, self._copier, ahead=self._ahead)

    def _items(self, indices: list[Any]) -> list[Any]:
        return [self._dataset[i] for i in indices]

    def _from_workers(self, num: int) -> Iterable[Batch]:
        if self._loader is None:
            self._loader = self._aside(self._loader_of(num))
        return self._loader

    def _loader_of(self, num: int) -> DataLoader[Batch]:
        return DataLoader(
            self._dataset,
            batch_sampler=Indices(self._plan, self._num_samples),
            collate_fn=self._collate,
            num_workers=num,
            prefetch_factor=self._ahead if num else None,
            persistent_workers=bool(num),
            generator=torch.Generator(),  # so that starting an epoch draws nothing of the script's
        )

    def _aside(self, loader: DataLoader[Batch] | Threads[Batch]) -> Iterable[Batch]:
        """With a thread that brings batches to the device."""
        return loader if self._device.type == "cpu" else Prefetch(loader, self._device, ahead=self._ahead)
