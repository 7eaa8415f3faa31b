"""A matrix of mostly zeros: dropout and products of all its numbers, against those of the ones that are not zero."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeMostlyZeros, TrialResult

_DROPPED: Final = 0.5


def run(trial: TimeMostlyZeros, scene: Scene) -> TrialResult:
    """Both ways on a random matrix of that density; where its numbers lie is known before, as it is where it stays the same."""
    # R rows, C columns, W width
    dtype = getattr(torch, trial.dtype)
    generator = torch.Generator().manual_seed(0)
    dense_RC = random_tensor((trial.rows, trial.columns), dtype, device=scene.device)
    dense_RC[(torch.rand(trial.rows, trial.columns, generator=generator) >= trial.density).to(scene.device)] = 0
    places = dense_RC.nonzero(as_tuple=True)
    if trial.task == "dropout":

        def all_numbers() -> Tensor:
            return F.dropout(dense_RC, _DROPPED)

        def those_there() -> Tensor:
            out = torch.zeros_like(dense_RC)
            out[places] = F.dropout(dense_RC[places], _DROPPED)
            return out

        return timed_passes(trial, all_numbers, those_there, scene, inputs=(), backward=False)
    sparse_RC = dense_RC.to_sparse()
    weight_CW = random_tensor((trial.columns, trial.width), dtype, device=scene.device).requires_grad_(trial.backward)
    return timed_passes(
        trial,
        lambda: dense_RC @ weight_CW,
        lambda: torch.sparse.mm(sparse_RC, weight_CW),
        scene,
        inputs=(weight_CW,),
        backward=trial.backward,
    )


TRIAL: Final = TrialEntry(TimeMostlyZeros, run)
