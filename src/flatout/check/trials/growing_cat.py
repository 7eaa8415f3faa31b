"""A tensor grown by concatenation, against one concatenation at the end."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeGrowingCat, TrialResult


def run(trial: TimeGrowingCat, scene: Scene) -> TrialResult:
    """Pieces appended one by one, against one cat of them all."""
    dtype = getattr(torch, trial.dtype)
    pieces = tuple(
        random_tensor(trial.piece, dtype, device=scene.device).requires_grad_(trial.backward)
        for _ in range(trial.count)
    )

    def growing() -> Tensor:
        whole = pieces[0]
        for piece in pieces[1:]:
            whole = torch.cat((whole, piece), dim=trial.dim)
        return whole

    def at_once() -> Tensor:
        return torch.cat(pieces, dim=trial.dim)

    return timed_passes(trial, growing, at_once, scene, inputs=pieces, backward=trial.backward, error=0.0)


TRIAL: Final = TrialEntry(TimeGrowingCat, run)
