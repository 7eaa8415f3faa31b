"""One-hot rows times a matrix, against looking the rows up."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeOneHot, TrialResult


def run(trial: TimeOneHot, scene: Scene) -> TrialResult:
    """One-hot rows built and multiplied, against an embedding."""
    # R rows, C classes, W width
    dtype = getattr(torch, trial.dtype)
    index_R = torch.arange(trial.rows, device=scene.device) * 7919 % trial.classes
    weight_CW = random_tensor((trial.classes, trial.width), dtype, device=scene.device).requires_grad_(trial.backward)

    def product() -> Tensor:
        return F.one_hot(index_R, trial.classes).to(dtype) @ weight_CW

    def lookup() -> Tensor:
        return F.embedding(index_R, weight_CW)

    return timed_passes(trial, product, lookup, scene, inputs=(weight_CW,), backward=trial.backward, error=0.0)


TRIAL: Final = TrialEntry(TimeOneHot, run)
