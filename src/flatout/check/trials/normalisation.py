"""A normalisation written out, against torch's own."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import largest_relative_error, timed_passes
from flatout.core.records.trial import TimeNormalisation, TrialResult


def run(trial: TimeNormalisation, scene: Scene) -> TrialResult:
    """The textbook formula in separate operators, against torch's own."""
    dtype, device, width = getattr(torch, trial.dtype), scene.device, trial.shape[-1]
    x, weight, bias = (
        random_tensor(s, dtype, device=device).requires_grad_(trial.backward) for s in (trial.shape, (width,), (width,))
    )

    def layer_written_out() -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias

    def rms_written_out() -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * weight

    is_layer = trial.kind == "layer"
    now = layer_written_out if is_layer else rms_written_out
    inputs = (x, weight, bias) if is_layer else (x, weight)

    def cured() -> Tensor:
        return F.layer_norm(x, (width,), weight, bias) if is_layer else F.rms_norm(x, (width,), weight, 1e-5)

    error = largest_relative_error(now, cured)
    return timed_passes(trial, now, cured, scene, inputs=inputs, backward=trial.backward, error=error)


TRIAL: Final = TrialEntry(TimeNormalisation, run)
