"""Equal linear layers on inputs of their own, one by one against one batched product."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeStackedLinears, TrialResult


def run(trial: TimeStackedLinears, scene: Scene) -> TrialResult:
    """Equal linear layers on inputs of their own one by one, and as one batched product with their weights stacked."""
    dtype, device = getattr(torch, trial.dtype), scene.device

    def random(*shape: int) -> Tensor:
        return random_tensor(shape, dtype, device=device).requires_grad_(trial.backward)

    x = random(trial.rows, trial.num, trial.in_features)
    weights = [random(trial.out_features, trial.in_features) for _ in range(trial.num)]
    biases = [random(trial.out_features) if trial.bias else None for _ in range(trial.num)]
    weight = random(trial.num, trial.in_features, trial.out_features)
    bias = random(trial.num, 1, trial.out_features) if trial.bias else None

    def one_by_one() -> list[Tensor]:
        return [F.linear(*inputs) for inputs in zip(x.unbind(1), weights, biases, strict=True)]

    def together() -> list[Tensor]:
        batch = x.transpose(0, 1)
        return [torch.bmm(batch, weight) if bias is None else torch.baddbmm(bias, batch, weight)]

    first = (x, *weights, *(b for b in biases if b is not None))
    second = (x, weight) if bias is None else (x, weight, bias)
    return timed_passes(trial, one_by_one, together, scene, inputs=first, cured_inputs=second, backward=trial.backward)


TRIAL: Final = TrialEntry(TimeStackedLinears, run)
