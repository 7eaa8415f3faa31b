"""What is searched for, how a candidate is made, measured, trained and judged, and which of them no other beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import ArchitectureTrial, Cost, SpaceValue
from flatout.shrink.module_mode import in_mode
from flatout.shrink.pareto import pareto_indices
from flatout.shrink.search.costs import Limit, Runner, count_cost, may_hold, over, with_latency
from flatout.shrink.search.slicing import Layout
from flatout.shrink.search.space import Space

Build: TypeAlias = Callable[[Mapping[str, SpaceValue]], nn.Module]
"""A choice into a model that is not trained."""
Train: TypeAlias = Callable[[nn.Module, int], Iterable[object] | None]
"""(model, seed): trains in place. A generator may be judged, and stopped, wherever it yields, the last time at its end."""
Evaluate: TypeAlias = Callable[[nn.Module], Tensor]
"""One score a held sample, [N], higher is better, in the same order for every model."""
_LONGER: Final = 5
TIME_S: Final = 0.2
"""That a candidate and the original model are timed for together in the search."""


class SearchTask(NamedTuple):
    """All that tells one search from another."""

    build: Build
    space: Space
    train: Train
    evaluate: Evaluate
    original: nn.Module
    inputs: tuple[Tensor, ...]
    limit: Limit
    seed: int
    layout: Layout | None
    runner: Runner | None

    def create(self, architecture: Mapping[str, SpaceValue], seed: int) -> nn.Module:
        """A candidate with fresh weights; global random numbers start from the seed. Raises UsageError when none is built."""
        torch.manual_seed(seed)
        model = self.build(dict(architecture))
        if not isinstance(model, nn.Module) or model is self.original:
            raise UsageError(
                f"build({dict(architecture)}) returned a {type(model).__name__}; it must return a new model"
            )
        return model

    def cost_of(self, model: nn.Module, *, time_s: float = TIME_S) -> Cost:
        """Counted, and then timed unless it misses the limit already; anew and longer where the interval straddles the limit."""
        cost = count_cost(model, self.inputs)
        if not self.limit.is_timed or over(cost, self.limit):
            return cost
        for share in (1, _LONGER):
            cost = with_latency(
                cost, model, self.original, inputs=self.inputs, runner=self.runner, time_s=share * time_s
            )
            if not (over(cost, self.limit) and may_hold(cost, self.limit)):
                break
        return cost

    def rounds(self, model: nn.Module, seed: int) -> Iterator[object]:
        """Train, yielding wherever it may be judged; random numbers start from the seed. UsageError when it never yields."""
        torch.manual_seed(seed)
        model.train()
        found = self.train(model, seed)
        num = 0
        for num, _ in enumerate((None,) if found is None else found, start=1):  # noqa: B007
            yield None
        if num == 0:
            raise UsageError("train yielded nothing; yield after each round, the last one included, or return None")


def scores(evaluate: Evaluate, model: nn.Module) -> list[float]:
    """Score of each held-out sample, in evaluation mode and without gradients. Raises UsageError for another shape or a NaN."""
    with in_mode(model, is_training=False), torch.no_grad():
        found = evaluate(model)
    if found.dim() != 1 or not len(found):
        raise UsageError(f"evaluate returned {tuple(found.shape)}; it must be one score for each held sample, [N]")
    own: list[float] = found.double().tolist()
    if not all(map(math.isfinite, own)):
        raise UsageError("evaluate returned a score that is not finite; give those samples the worst score")
    return own


def price(cost: Cost | None) -> float:
    """Cost that ranks candidates of equal score: latency beside the original model's, else operations."""
    if cost is None:
        return math.inf
    if cost.latency_fraction is not None:
        return cost.latency_fraction[0]
    return float(cost.work_flop if cost.work_flop is not None else cost.num_parameters)


def ranked_trials(rows: Sequence[ArchitectureTrial]) -> list[ArchitectureTrial]:
    """Finished trials, the best score first, of equal ones the cheapest."""
    done = [row for row in rows if row.state == "finished"]
    return sorted(done, key=lambda row: (-(row.score or 0.0), price(row.cost)))


def pareto_numbers(rows: Sequence[ArchitectureTrial]) -> tuple[int, ...]:
    """Numbers of the finished trials that no other beats in score and price, cheapest first."""
    done = ranked_trials(rows)
    places = pareto_indices([(-(row.score or 0.0), price(row.cost)) for row in done])
    return tuple(done[place].number for place in reversed(places))
