"""The winner beside the given model: timed longer, trained anew with other seeds, judged by samples of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from torch import nn

from flatout.compression.searching.costs import over
from flatout.compression.searching.intervals import paired_difference
from flatout.compression.searching.judging import judged_mean, rounds, scores
from flatout.compression.searching.kept import Weights
from flatout.compression.searching.slicing import inherit
from flatout.compression.searching.task import Evaluate, Task
from flatout.records.searching import Candidate, Cost, SearchReport

_TIME_S: Final = 1.0
_MOST_TIMED: Final = 5
"""Of the best trials, until one holds the limit when it is timed longer."""


class Proof(NamedTuple):
    """A candidate that holds the limit, and its scores by seed and sample."""

    row: Candidate
    cost: Cost
    module: nn.Module
    scores: list[float]
    seed_scores: list[list[float]]
    given_scores: list[float]

    def told(self, report: SearchReport) -> SearchReport:
        """The report with what was proved."""
        mean = [judged_mean(sample) for sample in zip(*self.seed_scores, strict=True)]
        return msgspec.structs.replace(
            report,
            winner=self.row.number,
            winner_cost=self.cost,
            winner_score=judged_mean(self.scores),
            seed_scores=tuple(map(judged_mean, self.seed_scores)),
            difference=paired_difference(self.scores, self.given_scores),
            seed_difference=paired_difference(mean, self.given_scores),
        )


def prove(
    rows: Sequence[Candidate], task: Task, weights: Weights, prove_with: Evaluate, *, num_seeds: int
) -> Proof | None:
    """Of the best of these trials that holds the limit when timed anew; None when none does.

    A seed that was trained before a kill is read from the weights kept.
    """
    for row in rows[:_MOST_TIMED]:
        cost = task.cost_of(task.made(row.choice, task.seed), time_s=_TIME_S)
        if not over(cost, task.limit):
            return _proved(row, cost, task, weights, prove_with, num_seeds)
    return None


def _proved(row: Candidate, cost: Cost, task: Task, weights: Weights, prove_with: Evaluate, num_seeds: int) -> Proof:
    models = [_trained(row, task, weights, seed=task.seed + 1 + number) for number in range(num_seeds)]
    best = max(range(num_seeds), key=lambda number: judged_mean(scores(task.evaluate, models[number])))
    found = [scores(prove_with, model) for model in models]
    return Proof(row, cost, models[best].eval(), found[best], found, scores(prove_with, task.given))


def _trained(row: Candidate, task: Task, weights: Weights, *, seed: int) -> nn.Module:
    name = f"proof-{row.number}-seed-{seed}"
    model = task.made(row.choice, seed)
    kept = weights.load(name)
    if kept is not None:
        model.load_state_dict(kept[0])
        return model
    inherit(model, task.given, layout=task.layout)
    for _ in rounds(task.train, model, seed):
        pass
    weights.save(name, model.state_dict(), [])
    return model
