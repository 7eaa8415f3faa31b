"""What one break of a graph costs compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from flatout.check.trials.context import Scene, TrialEntry
from flatout.check.trials.timing import timed_trial
from flatout.core.records.trial import TimeGraphBreak, TrialResult

_ELEMENTS: Final = 256
_NUM_OPERATORS: Final = 4


def run(trial: TimeGraphBreak, scene: Scene) -> TrialResult:
    """Two graphs (`now`) against one (`cured`), on operators so small that only what surrounds them counts."""
    x = torch.randn(_ELEMENTS, device=scene.device, requires_grad=trial.backward)

    def compiled(function: Callable[[Tensor], Tensor]) -> Callable[[], object]:
        whole: Callable[[Tensor], Any] = torch.compile(function, backend="aot_eager", dynamic=False)

        def call() -> object:
            out = whole(x)
            return torch.autograd.grad(out.sum(), x) if trial.backward else out

        call()
        return call

    two, one = compiled(_in_two_graphs), compiled(_in_one_graph)
    return timed_trial(trial, two, one, scene, min_s=0.3, max_s=2.0)


def _in_one_graph(x: Tensor) -> Tensor:
    for _ in range(_NUM_OPERATORS):
        x = x.sin()
    return x


def _in_two_graphs(x: Tensor) -> Tensor:
    for _ in range(_NUM_OPERATORS // 2):
        x = x.sin()
    torch._dynamo.graph_break()
    for _ in range(_NUM_OPERATORS // 2):
        x = x.sin()
    return x


TRIAL: Final = TrialEntry(TimeGraphBreak, run)
