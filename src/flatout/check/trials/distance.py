"""Distances of all pairs of points by differences, against torch.cdist and against one product."""

from __future__ import annotations

from typing import Final

import msgspec
import torch
from torch import Tensor

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import largest_relative_error, timed_passes
from flatout.core.records.trial import TimeDistance, TrialResult


def run(trial: TimeDistance, scene: Scene) -> TrialResult:
    """All differences written out, squared and added up, against torch.cdist and against one product: the faster counts."""
    # B batch, N points of a, M points of b, D dimensions
    dtype = getattr(torch, trial.dtype)
    a_BND, b_BMD = (
        random_tensor((trial.batch, n, trial.dim), dtype, device=scene.device).requires_grad_(trial.backward)
        for n in (trial.num_a, trial.num_b)
    )

    def written_out() -> Tensor:
        return ((a_BND[:, :, None] - b_BMD[:, None]) ** 2).sum(dim=-1)

    def cdist() -> Tensor:
        return torch.cdist(a_BND, b_BMD) ** 2

    def product() -> Tensor:
        squares = a_BND.square().sum(-1)[:, :, None] + b_BMD.square().sum(-1)[:, None]
        return torch.baddbmm(squares, a_BND, b_BMD.transpose(1, 2), alpha=-2).clamp_min(0)

    results = []
    for name, cured in (("torch.cdist", cdist), ("one product", product)):
        error = largest_relative_error(written_out, cured)
        result = timed_passes(
            trial, written_out, cured, scene, inputs=(a_BND, b_BMD), backward=trial.backward, error=error
        )
        results.append(msgspec.structs.replace(result, variant=name))
    return min(results, key=lambda r: (r.cured_s or 0.0) / (r.now_s or 1.0))


TRIAL: Final = TrialEntry(TimeDistance, run)
