"""The plan of global batches and of the samples that each rank takes of them: a uniform shuffle, shared out by cost.

Every rank plans the whole batch for itself, from three integers (seed, epoch, step), and so knows without a message what all of
them together hold: the exact mean of a loss over ranks and accumulation needs no further count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from functools import lru_cache
from statistics import fmean
from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.data.epochs import AHEAD, EpochPlan, Sizes, key_from
from flatout.core.errors import UsageError
from flatout.machine.cost.batching import SampleCost, idle_fraction, longest_first, variance_inflation

_WINDOW: Final = 256
"""Batches between which samples may be exchanged when `max_vif` allows it."""
_THRESHOLDS: Final = (3.0, 2.0, 1.5, 1.0, 0.6, 0.4)
_ROOMS: Final = (1.0, 0.95, 0.9)
_TRIED_SAMPLES: Final = 100_000
_FEWEST_TRIED, _MOST_TRIED = 128, 2048
"""Batches that a choice of the grouping looks at: two seconds' work."""


class Grouping(NamedTuple):
    """How samples that are too large for their batch are put together; infinite `threshold`: not at all.

    Those that cost more than `threshold` mean rank costs begin a batch each, which is filled up until it holds `room` times what
    occupies all ranks as long as its first. The lower the threshold and the more room, the less idle time, and the more batches
    differ.
    """

    threshold: float = math.inf
    room: float = 1.0


class Step(NamedTuple):
    """One optimizer step: `ranks[r][m]` are the samples of rank r in its micro-batch m; counts are of all of them."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    num_samples: int
    num_tokens: int


class BatchReport(NamedTuple):
    """What a plan is worth, by its cost model, over `num_steps` steps.

    Batches are packed; `padded_fraction` is what padding each micro-batch to its longest would waste.
    `idle_fraction` is the share of the ranks' time that goes by at the barrier; it is at least 1 - `mean_over_largest` where that
    is below 1: the mean cost of a rank over its batch's largest sample. `vif` is 1 for a uniform shuffle (by expectation).
    """

    padded_fraction: float
    idle_fraction: float
    vif: float
    mean_over_largest: float
    num_steps: int


class Batches(EpochPlan[int]):
    """A `batch_sampler`: the indices of this rank's micro-batches, `accumulate` of them for each optimizer step.

    `lengths` are those of all samples; `size` samples (or as many as `tokens` hold) make a global batch, over all ranks and the
    whole accumulation. Global batches are cut from a uniform shuffle keyed by (seed, epoch), the same on every rank; the samples
    of one are shared out longest-first by `cost`. With `max_vif` above 1 samples too large for their batch are put together with
    others of their kind, as far as the noise that this adds to gradients (`BatchReport.vif`) stays below; 1 changes no batch.

    `sizes`, as `growing_sizes` returns them, is the length to which samples are cut after so many epochs; longer ones count so.
    Batches and reports are made for whole lengths all the same.

    The last batch of an epoch may be smaller; one with fewer samples than `num_ranks * accumulate` is left out.

    >>> batches = Batches([3, 1, 2, 2], size=2, num_ranks=2)
    >>> len(batches), [len(b) for b in batches]
    (2, [1, 1])

    Raises UsageError for sizes that cannot be shared out.
    """

    def __init__(
        self,
        lengths: Iterable[int] | Tensor,
        size: int = 0,
        *,
        tokens: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        accumulate: int = 1,
        cost: SampleCost | None = None,
        seed: int = 0,
        max_vif: float = 1.0,
        sizes: Sizes | None = None,
    ) -> None:
        self._sizes = sizes
        super().__init__(lengths, rank=rank, num_ranks=num_ranks, accumulate=accumulate, cost=cost, seed=seed)
        _check(self._lengths, size, tokens, num_ranks * accumulate, max_vif)
        self._size, self._tokens = size, tokens
        self._costs = [self._cost.of(n) for n in self._lengths]
        self._epoch_of = lru_cache(2)(self._cut)
        self._window_of = lru_cache(2)(self._regrouped)
        self._step_of = lru_cache(4 * AHEAD)(self._shared_out)  # those ahead, and as many that were looked at since
        self._grouping = Grouping() if max_vif == 1 else self._best_grouping(max_vif)

    def num_steps(self, epoch: int | None = None) -> int:
        """The number of steps of an epoch; epochs differ only with `tokens`."""
        return len(self._epoch_of(self.epoch if epoch is None else epoch))

    def _own(self, number: int, epoch: int) -> list[list[int]]:
        return [list(micro) for micro in self.step(number, epoch).ranks[self._rank]]

    def step(self, number: int, epoch: int | None = None) -> Step:
        """What all ranks do in one optimizer step of an epoch (the next one, if not given)."""
        return self._step_of(number, self.epoch if epoch is None else epoch)

    def size_at(self, number: int, epoch: int | None = None) -> int | None:
        """The size of samples in a step, by how much of the epoch was before it; None where they are as they are."""
        epoch = self.epoch if epoch is None else epoch
        return None if self._sizes is None else self._sizes(epoch + number / self.num_steps(epoch))

    def _shared_out(self, number: int, epoch: int) -> Step:
        samples = self._samples(epoch, number, self._grouping)
        size = self.size_at(number, epoch)
        lengths = [self._lengths[i] for i in samples]
        costs = [self._costs[i] for i in samples]
        if size is not None and size < max(lengths):
            lengths = [min(n, size) for n in lengths]
            costs = [self._cost.of(n) for n in lengths]
        shares = longest_first(costs, self._num_ranks, fewest=self.accumulate)
        ranks = tuple(
            tuple(tuple(samples[i] for i in part) for part in self._micro_batches(share, lengths)) for share in shares
        )
        return Step(ranks, len(samples), sum(lengths))

    def report(self, *, num_steps: int = 2000) -> BatchReport:
        """What the plan is worth over the epochs from 0 on, until so many steps were seen."""
        return self._report(num_steps, self._grouping)

    def _micro_batches(self, share: list[int], lengths: list[int]) -> list[list[int]]:
        """A rank's places in the batch, by micro-batch."""
        if self.accumulate == 1:
            return [share]
        parts = longest_first([float(lengths[i]) for i in share], self.accumulate)
        return [[share[i] for i in part] for part in parts]

    # -- global batches -------------------------------------------------------------------------------------------------------

    def _samples(self, epoch: int, number: int, grouping: Grouping) -> list[int]:
        """The samples of one global batch."""
        if math.isinf(grouping.threshold):
            return self._epoch_of(epoch)[number]
        return self._window_of(epoch, number // _WINDOW, grouping)[number % _WINDOW]

    def _cut(self, epoch: int) -> list[list[int]]:
        """The uniform shuffle of an epoch in pieces."""
        order = torch.randperm(len(self._lengths), generator=key_from(self.seed, epoch).generator()).tolist()
        size = self._size
        pieces = [order[at : at + size] for at in range(0, len(order), size)] if size else self._by_tokens(order)
        fewest = self._num_ranks * self.accumulate
        return pieces if len(pieces[-1]) >= fewest else pieces[:-1]

    def _by_tokens(self, order: list[int]) -> list[list[int]]:
        pieces: list[list[int]] = [[]]
        filled, fewest = 0, self._num_ranks * self.accumulate
        for index in order:
            if filled + self._lengths[index] > self._tokens and len(pieces[-1]) >= fewest:
                pieces.append([])
                filled = 0
            pieces[-1].append(index)
            filled += self._lengths[index]
        return pieces

    def _regrouped(self, epoch: int, window: int, grouping: Grouping) -> list[list[int]]:
        """The batches of a window of the shuffle, where samples that would keep the other ranks waiting lie together.

        A batch whose largest sample costs c lasts as long as c, however it is shared out; so it should hold `num_ranks` times
        that, and is filled up with the largest samples there are until it does, the rest of it at random.
        """
        pieces = self._epoch_of(epoch)[window * _WINDOW : (window + 1) * _WINDOW]
        ordered = sorted((i for piece in pieces for i in piece), key=lambda i: -self._costs[i])
        draw = random.Random(key_from(self.seed, epoch, window).number)
        batches, rest = self._with_the_large(ordered, [len(piece) for piece in pieces], grouping)
        draw.shuffle(rest)
        for batch, piece in zip(batches, pieces, strict=True):
            missing = len(piece) - len(batch)
            batch.extend(rest[:missing])
            del rest[:missing]
        last = [batches.pop()] if len(pieces[-1]) < len(pieces[0]) else []  # of an epoch; it stays the last
        draw.shuffle(batches)
        return batches + last

    def _with_the_large(
        self, ordered: list[int], sizes: list[int], grouping: Grouping
    ) -> tuple[list[list[int]], list[int]]:
        """Batches begun with the samples that are too large, and all other samples."""
        whole = sum(self._costs[i] for i in ordered) / len(sizes)
        num_large = sum(self._num_ranks * self._costs[i] > grouping.threshold * whole for i in ordered)
        small = [self._costs[i] for i in ordered[num_large:]]
        usual = fmean(small) if small else 0.0
        batches: list[list[int]] = []
        at = 0
        for size in sizes:
            batch: list[int] = []
            if at < num_large:
                wanted, filled = grouping.room * self._num_ranks * self._costs[ordered[at]], 0.0
                while len(batch) < size and at < len(ordered):
                    if batch and filled + (size - len(batch)) * usual >= wanted:
                        break
                    batch.append(ordered[at])
                    filled += self._costs[ordered[at]]
                    at += 1
            batches.append(batch)
        return batches, ordered[at:]

    def _best_grouping(self, max_vif: float) -> Grouping:
        """The one with the least idle time whose noise stays below, as far as some hundred batches tell."""
        num_tried = max(_FEWEST_TRIED, min(_MOST_TRIED, _TRIED_SAMPLES // self._size))
        options = [Grouping(), *(Grouping(threshold, room) for threshold in _THRESHOLDS for room in _ROOMS)]
        found = {option: self._report(num_tried, option) for option in options}
        noise = 1 + math.sqrt(2 / num_tried)  # of a variance, where batches are nearly normal
        allowed = {option: r for option, r in found.items() if option == options[0] or noise * r.vif <= max_vif}
        return min(allowed, key=lambda option: allowed[option].idle_fraction)

    def _report(self, num_steps: int, grouping: Grouping) -> BatchReport:
        rows: list[list[float]] = []
        batches: list[list[int]] = []
        over: list[float] = []
        filled = padded = 0
        for epoch, number in self._steps_from_first(num_steps):
            selected = self._samples(epoch, number, grouping)
            costs = [self._costs[i] for i in selected]
            shares = longest_first(costs, self._num_ranks, fewest=self.accumulate)
            rows.append([sum(costs[i] for i in share) for share in shares])
            lengths = [self._lengths[i] for i in selected]
            batches.append(lengths)
            over.append(sum(costs) / self._num_ranks / max(costs))
            for part in (part for share in shares for part in self._micro_batches(share, lengths)):
                sizes = [lengths[i] for i in part]
                filled += sum(sizes)
                padded += len(sizes) * max(sizes)
        return BatchReport(
            padded_fraction=1 - filled / padded,
            idle_fraction=idle_fraction(rows),
            vif=variance_inflation(batches),
            mean_over_largest=fmean(over),
            num_steps=len(rows),
        )


def _check(lengths: list[int], size: int, tokens: int, fewest: int, max_vif: float) -> None:
    if bool(size) == bool(tokens) or size < 0 or tokens < 0:
        raise UsageError(
            f"size {size} and tokens {tokens}: give one of them, the samples or the tokens of a global batch"
        )
    if size and size < fewest:
        raise UsageError(
            f"a batch of {size} cannot be shared out to the {fewest} micro-batches of all ranks; give as many or more"
        )
    if len(lengths) < fewest:
        raise UsageError(f"{len(lengths)} samples are fewer than the {fewest} micro-batches of one step")
    if min(lengths) < 1:
        raise UsageError(f"sample {lengths.index(min(lengths))} has length {min(lengths)}; leave out what is empty")
    if max_vif < 1 or (tokens and max_vif != 1):
        why = (
            "no batching has less noise than a uniform shuffle"
            if max_vif < 1
            else "batches by tokens stay a uniform shuffle"
        )
        raise UsageError(f"max_vif {max_vif:g}: {why}; give 1")
