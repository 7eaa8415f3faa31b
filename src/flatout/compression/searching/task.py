"""What is searched for, and how a candidate is made and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flatout.compression.searching.costs import Limit, Runner, counted, may_hold, over, timed
from flatout.compression.searching.slicing import Layout
from flatout.compression.searching.space import Space
from flatout.errors import UsageError
from flatout.records.searching import Choice, Cost

Build: TypeAlias = Callable[[Mapping[str, Choice]], nn.Module]
"""A choice into a model that is not trained."""
Train: TypeAlias = Callable[[nn.Module, int], Iterable[object] | None]
"""(model, seed): trains in place. A generator may be judged, and stopped, wherever it yields, the last time at its end."""
Evaluate: TypeAlias = Callable[[nn.Module], Tensor]
"""One score a held sample, [N], higher is better, in the same order for every model."""
_LONGER: Final = 5
TIME_S: Final = 0.2
"""That a candidate and the given model are timed for together in the search."""


class Task(NamedTuple):
    """All that tells one search from another."""

    build: Build
    space: Space
    train: Train
    evaluate: Evaluate
    given: nn.Module
    inputs: tuple[Tensor, ...]
    limit: Limit
    seed: int
    layout: Layout | None
    runner: Runner | None

    def made(self, choice: Mapping[str, Choice], seed: int) -> nn.Module:
        """A candidate with fresh weights; global random numbers start from the seed. Raises UsageError when none is built."""
        torch.manual_seed(seed)
        model = self.build(dict(choice))
        if not isinstance(model, nn.Module) or model is self.given:
            raise UsageError(f"build({dict(choice)}) returned a {type(model).__name__}; it must return a new model")
        return model

    def cost_of(self, model: nn.Module, *, time_s: float = TIME_S) -> Cost:
        """Counted, and then timed unless it misses the limit already; anew and longer where the interval straddles the limit."""
        cost = counted(model, self.inputs)
        if not self.limit.is_timed or over(cost, self.limit):
            return cost
        for share in (1, _LONGER):
            cost = timed(cost, model, self.given, inputs=self.inputs, runner=self.runner, time_s=share * time_s)
            if not (over(cost, self.limit) and may_hold(cost, self.limit)):
                break
        return cost
