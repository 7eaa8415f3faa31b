"""How evenly ranks share the work of a step: what follows from the sizes of their batches, and what remains with one rank."""

from __future__ import annotations

from collections import Counter
from statistics import fmean, median
from typing import NamedTuple

from flatout.cost.waiting import Line, fit
from flatout.records.distributed import Distributed


class Balance(NamedTuple):
    """Work and elements of the steps that all ranks know: `work_s[i]` holds those of step `steps[i]`, in the order of `ranks`.

    `line` is work as a function of elements, over all ranks and steps.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    work_s: tuple[tuple[float, ...], ...]
    elements: tuple[tuple[int, ...], ...]
    line: Line

    @property
    def mean_work_s(self) -> tuple[float, ...]:
        """Mean own work of each rank."""
        return tuple(fmean(column) for column in zip(*self.work_s, strict=True))

    @property
    def saved_by_even_sizes(self) -> float:
        """Share of the longest rank's work, over all steps, that even sizes would save, as far as sizes explain work."""
        slope = max(0.0, self.line.slope)
        longest_s = sum(max(row) for row in self.work_s)
        return min(1.0, sum(slope * (max(n) - fmean(n)) for n in self.elements) / longest_s) if longest_s else 0.0

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank that is most often slowest beyond what its batch explains, and in which share of the steps."""
        counts = Counter(self.ranks[max(range(len(row)), key=row.__getitem__)] for row in self._beyond())
        rank, num = counts.most_common(1)[0]
        return rank, num / len(self.steps)

    def extra_s(self, rank: int) -> float:
        """Median over steps of this rank's work beyond the next slowest's, less what the sizes explain."""
        index = self.ranks.index(rank)
        return median(row[index] - max(w for i, w in enumerate(row) if i != index) for row in self._beyond())

    def _beyond(self) -> list[list[float]]:
        """Work less what its size adds to that of a mean batch."""
        # Sizes that follow the rank alone cannot be told from the rank; then the whole difference is charged to them.
        slope = max(0.0, self.line.slope) if self.line.explained_fraction > 0.1 else 0.0
        return [
            [w - slope * (n - fmean(sizes)) for w, n in zip(work, sizes, strict=True)]
            for work, sizes in zip(self.work_s, self.elements, strict=True)
        ]


def balance_of(distributed: Distributed | None) -> Balance | None:
    """The balance of a merged run; None when fewer than two ranks are known, or they have no step in common."""
    ranks = [r for r in distributed.ranks if r.step_numbers] if distributed is not None else []
    if len(ranks) < 2:
        return None
    tables = [dict(zip(r.step_numbers, zip(r.work_by_step, r.batch_elements, strict=True), strict=True)) for r in ranks]
    steps = sorted(set.intersection(*(set(t) for t in tables)))
    if not steps:
        return None
    work = tuple(tuple(t[n][0] for t in tables) for n in steps)
    elements = tuple(tuple(t[n][1] for t in tables) for n in steps)
    line = fit([float(n) for row in elements for n in row], [w for row in work for w in row])
    return Balance(tuple(r.rank for r in ranks), tuple(steps), work, elements, line)
