"""Linear layers on one input, one by one against one product."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeMergedLinears, TrialResult


def run(trial: TimeMergedLinears, scene: Scene) -> TrialResult:
    """Linear layers one by one, and as one product with the weights stacked."""
    dtype, device = getattr(torch, trial.dtype), scene.device

    def random(*shape: int) -> Tensor:
        return random_tensor(shape, dtype, device=device).requires_grad_(trial.backward)

    x = random(trial.rows, trial.in_features)
    weights = [random(n, trial.in_features) for n in trial.out_features]
    biases = [random(n) if trial.bias else None for n in trial.out_features]
    total = sum(trial.out_features)
    weight, bias = random(total, trial.in_features), random(total) if trial.bias else None

    def one_by_one() -> list[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    def together() -> list[Tensor]:
        return list(F.linear(x, weight, bias).split(trial.out_features, dim=-1))

    first = (x, *weights, *(b for b in biases if b is not None))
    second = (x, weight) if bias is None else (x, weight, bias)
    return timed_passes(trial, one_by_one, together, scene, inputs=first, cured_inputs=second, backward=trial.backward)


TRIAL: Final = TrialEntry(TimeMergedLinears, run)
