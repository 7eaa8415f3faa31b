"""How candidates are trained and judged, and which of them no other beats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from flatout.compression.searching.costs import called
from flatout.compression.searching.task import Evaluate, Train
from flatout.errors import UsageError
from flatout.records.searching import Candidate, Cost


def rounds(train: Train, model: nn.Module, seed: int) -> Iterator[object]:
    """Train, yielding wherever it may be judged; random numbers start from the seed. Raises UsageError when it never yields."""
    torch.manual_seed(seed)
    model.train()
    found = train(model, seed)
    if found is None:
        yield None
        return
    num = 0
    for num, _ in enumerate(found, start=1):  # noqa: B007
        yield None
    if num == 0:
        raise UsageError("train yielded nothing; yield after each round, the last one included, or return None")


def scores(evaluate: Evaluate, model: nn.Module) -> list[float]:
    """Of each held sample, in evaluation mode and without gradients. Raises UsageError for another shape or a NaN."""
    with called(model), torch.no_grad():
        found = evaluate(model)
    if found.dim() != 1 or not len(found):
        raise UsageError(f"evaluate returned {tuple(found.shape)}; it must be one score for each held sample, [N]")
    own: list[float] = found.double().tolist()
    if not all(map(math.isfinite, own)):
        raise UsageError("evaluate returned a score that is not finite; give those samples the worst score")
    return own


def judged_mean(values: Sequence[float]) -> float:
    """Of scores."""
    return math.fsum(values) / len(values)


def price(cost: Cost | None) -> float:
    """By which two candidates of equal score are told apart: latency beside the given model's, else operations."""
    if cost is None:
        return math.inf
    if cost.latency_fraction is not None:
        return cost.latency_fraction[0]
    return float(cost.work_flop if cost.work_flop is not None else cost.num_parameters)


def ranked(rows: Sequence[Candidate]) -> list[Candidate]:
    """Finished trials, the best score first, of equal ones the cheapest."""
    done = [row for row in rows if row.state == "finished"]
    return sorted(done, key=lambda row: (-(row.score or 0.0), price(row.cost)))


def front(rows: Sequence[Candidate]) -> tuple[int, ...]:
    """Numbers of the finished trials that no other beats in score and price, cheapest first."""
    found: list[Candidate] = []
    for row in ranked(rows):
        if not found or price(row.cost) < price(found[-1].cost):
            found.append(row)
    return tuple(row.number for row in reversed(found))
