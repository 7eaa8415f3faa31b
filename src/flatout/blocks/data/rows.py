"""Samples packed into rows of one length, for compiled and captured shapes: batches of one shape, hardly a token wasted."""

# R rows, L tokens of a row

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flatout.blocks.data.epochs import EpochPlan, key_from
from flatout.blocks.data.prefetch import Wrapper, items_of
from flatout.core.errors import UsageError
from flatout.machine.cost.batching import SampleCost, idle_fraction

_WINDOW: Final = 4096
"""Samples of the shuffle that are packed together: enough short ones to fill the gaps, few enough to stay near the shuffle."""
_GAP: Final = 0.01
"""Of a row: what is left free without looking for another way to fill it."""

Row = tuple[int, ...]
"""Indices of the samples of a row."""


class RowReport(NamedTuple):
    """What a plan is worth over `num_steps` steps: the share of tokens that is padding, and of the ranks' time at the barrier."""

    waste_fraction: float
    idle_fraction: float
    num_steps: int


class Rows(EpochPlan[Row]):
    """A `batch_sampler` for a dataset of rows (`RowsOf`): `num_rows` rows of `length` tokens for each micro-batch of this rank.

    Samples come in the order of a uniform shuffle keyed by (seed, epoch), are packed some thousand at a time, the longest first,
    and the rows are shuffled. The rows of an optimizer step are shared out by `cost`, the same number to each rank. What does not
    fill a last step is left out of the epoch. Raises UsageError for a sample longer than a row.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor,
        length: int,
        num_rows: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        accumulate: int = 1,
        cost: SampleCost | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(lengths, rank=rank, num_ranks=num_ranks, accumulate=accumulate, cost=cost, seed=seed)
        if num_rows < 1:
            raise UsageError(f"{num_rows} rows in a micro-batch; give 1 or more")
        if not self._lengths or min(self._lengths) < 1:
            raise UsageError("there is no sample, or an empty one; leave out what is empty")
        longest = max(self._lengths)
        if longest > length:
            raise UsageError(
                f"sample {self._lengths.index(longest)} has {longest} tokens and a row has {length}; cut it, or give longer rows"
            )
        self.length, self._num_rows = length, num_rows
        self._rows_of = lru_cache(2)(self._packed)

    def num_steps(self, epoch: int | None = None) -> int:
        """The number of optimizer steps of an epoch."""
        return len(self._rows_of(self.epoch if epoch is None else epoch)) // self._per_step

    @property
    def _per_step(self) -> int:
        return self._num_rows * self._num_ranks * self.accumulate

    def _own(self, number: int, epoch: int) -> list[list[Row]]:
        mine = self.step(number, epoch)[self._rank]
        return [list(mine[at : at + self._num_rows]) for at in range(0, len(mine), self._num_rows)]

    def step(self, number: int, epoch: int | None = None) -> tuple[tuple[Row, ...], ...]:
        """The rows of each rank in one optimizer step."""
        rows = self._rows_of(self.epoch if epoch is None else epoch)
        selected = rows[number * self._per_step : (number + 1) * self._per_step]
        shares: list[list[Row]] = [[] for _ in range(self._num_ranks)]
        loads = [0.0] * self._num_ranks
        for cost, row in sorted(((self._cost_of(row), row) for row in selected), reverse=True):
            open_ranks = [r for r, share in enumerate(shares) if len(share) < self._num_rows * self.accumulate]
            rank = min(open_ranks, key=loads.__getitem__)
            shares[rank].append(row)
            loads[rank] += cost
        return tuple(map(tuple, shares))

    def report(self, *, num_steps: int = 500) -> RowReport:
        """What the plan is worth over the epochs from 0 on, until so many steps were seen."""
        costs: list[list[float]] = []
        tokens = 0
        if not self.num_steps(0):
            raise UsageError(
                f"the samples fill {len(self._rows_of(0))} rows, a step takes {self._per_step}; give fewer"
            )
        for epoch, number in self._steps_from_first(num_steps):
            ranks = self.step(number, epoch)
            costs.append([sum(map(self._cost_of, rows)) for rows in ranks])
            tokens += sum(self._lengths[i] for rows in ranks for row in rows for i in row)
        return RowReport(
            waste_fraction=1 - tokens / (len(costs) * self._per_step * self.length),
            idle_fraction=idle_fraction(costs),
            num_steps=len(costs),
        )

    def _cost_of(self, row: Row) -> float:
        return sum(self._cost.of(self._lengths[i]) for i in row)

    def _packed(self, epoch: int) -> list[Row]:
        """The rows of an epoch, shuffled."""
        key = key_from(self.seed, epoch)
        order = torch.randperm(len(self._lengths), generator=key.generator()).tolist()
        rows: list[Row] = []
        for at in range(0, len(order), _WINDOW):
            rows += filled([(self._lengths[i], i) for i in order[at : at + _WINDOW]], self.length)
        random.Random(key.number).shuffle(rows)
        return rows


def filled(samples: Sequence[tuple[int, int]], length: int) -> list[Row]:
    """Rows of at most `length` for samples (their length, index): each begins with the longest that is left and is filled up.

    With the longest that fits, again and again: first-fit-decreasing, which takes at most 11/9 of the fewest rows (Johnson 1973).
    Where that leaves a gap, also with samples near an even share of what is free, as lengths that hardly differ want it.

    >>> filled([(3, 0), (5, 1), (2, 2)], 5)
    [(1,), (0, 2)]
    """
    left = sorted(samples)
    rows: list[Row] = []
    mean = sum(size for size, _ in left) / len(left) if left else 0.0
    while left:
        first = left.pop()
        free = length - first[0]
        options = [_longest_that_fit(left, free)]
        if free - _size(options[0]) > _GAP * length:
            several = round(free / mean)
            options += [_even_shares(left, free, num) for num in {several - 1, several, several + 1} if num > 0]
        best = max(options, key=_size)
        _take(left, best)
        more = _longest_that_fit(left, free - _size(best))
        _take(left, more)
        rows.append((first[1], *(index for _, index in (*best, *more))))
    return rows


def _take(left: list[tuple[int, int]], samples: Sequence[tuple[int, int]]) -> None:
    for sample in samples:
        del left[bisect_left(left, sample)]


def _size(samples: Sequence[tuple[int, int]]) -> int:
    return sum(size for size, _ in samples)


def _longest_that_fit(left: list[tuple[int, int]], free: int) -> list[tuple[int, int]]:
    """The longest sample that fits, then the longest after it that fits what is free then, and so on."""
    found: list[tuple[int, int]] = []
    at = len(left)
    while (at := bisect_left(left, (free + 1, -1), 0, at)) and free > 0:
        at -= 1
        found.append(left[at])
        free -= left[at][0]
    return found


def _even_shares(left: list[tuple[int, int]], free: int, num: int) -> list[tuple[int, int]]:
    """So many samples, each near an even share of what is still free; the last is the longest that fits."""
    found: list[tuple[int, int]] = []
    taken: set[int] = set()
    for number in range(num, 0, -1):
        at = bisect_left(left, (free // number + 1, -1)) - 1
        while at >= 0 and at in taken:
            at -= 1
        if at < 0:
            return found
        taken.add(at)
        found.append(left[at])
        free -= left[at][0]
    return found


class PackedRows(NamedTuple):
    """Rows of one shape. `values` (R, L, ...); `samples` (R, L) numbers the samples of each row from 0, and is -1 on padding;
    `positions` (R, L) is each token's place in its sample, 0 on padding."""

    values: Tensor
    samples: Tensor
    positions: Tensor

    @property
    def mask(self) -> Tensor:
        """The mask of real tokens, (R, L)."""
        return self.samples >= 0


class RowsOf(Wrapper, Dataset[Any]):
    """A dataset of rows: an index is a row of indices of the dataset that is wrapped, an item the tensors of its samples."""

    def __getitem__(self, row: Row) -> Any:
        return items_of(self._wrapped, row)


def pack(rows: Sequence[Sequence[Tensor]], length: int, *, value: float = 0) -> PackedRows:
    """The samples of each row behind one another, filled up with `value`: the collate function of `RowsOf`, given the length.

    Raises UsageError when the samples of a row are longer than `length` together.
    """
    first = rows[0][0]
    values = first.new_full((len(rows), length, *first.shape[1:]), value)
    samples = torch.full((len(rows), length), -1)
    positions = torch.zeros((len(rows), length), dtype=torch.int64)
    for number, row in enumerate(rows):
        sizes = [sample.size(0) for sample in row]
        if sum(sizes) > length:
            raise UsageError(
                f"row {number} holds {sum(sizes)} tokens and has room for {length}; plan with the same length"
            )
        filled = sum(sizes)
        torch.cat(list(row), out=values[number, :filled])
        samples[number, :filled] = torch.arange(len(row)).repeat_interleave(torch.tensor(sizes), output_size=filled)
        torch.cat([torch.arange(size) for size in sizes], out=positions[number, :filled])
    return PackedRows(values, samples, positions)
