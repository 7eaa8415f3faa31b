"""The winner beside the original model: timed longer, trained anew with other seeds, judged by samples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import msgspec
from torch import nn

from flatout.core.records.architecture_search import ArchitectureTrial, Cost, SearchReport
from flatout.shrink.score_intervals import paired_difference
from flatout.shrink.search.costs import over
from flatout.shrink.search.slicing import inherit
from flatout.shrink.search.storage import load_weights, save_weights
from flatout.shrink.search.task import Evaluate, SearchTask, scores

_TIME_S: Final = 1.0
_MOST_TIMED: Final = 5
"""Of the best trials, until one holds the limit when it is timed longer."""


class Proof(NamedTuple):
    """A candidate that holds the limit, and its scores by seed and sample."""

    row: ArchitectureTrial
    cost: Cost
    module: nn.Module
    scores: list[float]
    seed_scores: list[list[float]]
    original_scores: list[float]

    def added_to(self, report: SearchReport) -> SearchReport:
        """The report with what was proved."""
        mean = [fmean(sample) for sample in zip(*self.seed_scores, strict=True)]
        return msgspec.structs.replace(
            report,
            winner=self.row.number,
            winner_cost=self.cost,
            winner_score=fmean(self.scores),
            seed_scores=tuple(map(fmean, self.seed_scores)),
            difference=paired_difference(self.scores, self.original_scores),
            seed_difference=paired_difference(mean, self.original_scores),
        )


def prove_winner(
    rows: Sequence[ArchitectureTrial], task: SearchTask, storage: Path, prove_with: Evaluate, *, num_seeds: int
) -> Proof | None:
    """Proof of the best of these trials that holds the limit when it is timed again; None when none does.

    A seed that was trained before a kill is read from the weights kept.
    """
    for row in rows[:_MOST_TIMED]:
        cost = task.cost_of(task.create(row.architecture, task.seed), time_s=_TIME_S)
        if not over(cost, task.limit):
            return _proved(row, cost, task, storage, prove_with, num_seeds)
    return None


def _proved(
    row: ArchitectureTrial, cost: Cost, task: SearchTask, storage: Path, prove_with: Evaluate, num_seeds: int
) -> Proof:
    models = [_trained(row, task, storage, seed=task.seed + 1 + number) for number in range(num_seeds)]
    best = max(range(num_seeds), key=lambda number: fmean(scores(task.evaluate, models[number])))
    found = [scores(prove_with, model) for model in models]
    return Proof(row, cost, models[best].eval(), found[best], found, scores(prove_with, task.original))


def _trained(row: ArchitectureTrial, task: SearchTask, storage: Path, *, seed: int) -> nn.Module:
    name = f"proof-{row.number}-seed-{seed}"
    model = task.create(row.architecture, seed)
    saved = load_weights(storage, name)
    if saved is not None:
        model.load_state_dict(saved)
        return model
    inherit(model, task.original, layout=task.layout)
    for _ in task.rounds(model, seed):
        pass
    save_weights(storage, name, model.state_dict())
    return model
