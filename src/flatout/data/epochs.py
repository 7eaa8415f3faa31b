"""What all plans of batches have in common: known from (seed, epoch, step), planned ahead in a thread, begun anywhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

from torch.utils.data import Sampler

from flatout.data.prefetch import Prefetch
from flatout.errors import UsageError

Item = TypeVar("Item")

AHEAD: Final = 4
"""Steps that are planned before they are wanted."""


class EpochPlan(Sampler[list[Item]], ABC):
    """A `batch_sampler` that iterates over the micro-batches of one rank in one epoch, `accumulate` of them a step."""

    def __init__(self, *, seed: int, accumulate: int) -> None:
        self._seed, self._accumulate = seed, accumulate
        self._epoch = self._start = 0

    @property
    def seed(self) -> int:
        """With the epoch and the step, all there is to know."""
        return self._seed

    @property
    def epoch(self) -> int:
        """That is iterated over next."""
        return self._epoch

    @property
    def accumulate(self) -> int:
        """Micro-batches of an optimizer step."""
        return self._accumulate

    @property
    def start(self) -> int:
        """The optimizer step that is iterated over first."""
        return self._start

    def size_at(self, number: int, epoch: int | None = None) -> int | None:
        """What samples are cut or made to in a step; None where they are as they are."""
        return None

    def set_epoch(self, epoch: int, *, step: int = 0) -> None:
        """Iterate over this epoch next, from this optimizer step on: nothing is read or drawn for the steps before."""
        if epoch < 0 or not 0 <= step <= self.num_steps(epoch):
            raise UsageError(f"epoch {epoch}, step {step}: the epoch has steps 0 to {self.num_steps(max(0, epoch))}")
        self._epoch, self._start = epoch, step

    @abstractmethod
    def num_steps(self, epoch: int | None = None) -> int:
        """Optimizer steps of an epoch (the one that is iterated over next, if not given); epochs may differ by some."""

    @abstractmethod
    def _own(self, number: int, epoch: int) -> Iterable[list[Item]]:
        """This rank's micro-batches of one step."""

    def __len__(self) -> int:
        """Micro-batches that iterating gives."""
        return (self.num_steps() - self._start) * self._accumulate

    def __iter__(self) -> Iterator[list[Item]]:
        """Planned some steps ahead, in a thread."""
        epoch, start = self._epoch, self._start
        steps = (self._own(number, epoch) for number in range(start, self.num_steps(epoch)))
        for micro_batches in Prefetch(steps, ahead=AHEAD):
            yield from micro_batches
