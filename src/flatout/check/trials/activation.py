"""GELU written out, against torch's own."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import largest_relative_error, timed_passes
from flatout.core.records.trial import TimeActivation, TrialResult


def run(trial: TimeActivation, scene: Scene) -> TrialResult:
    """The formula in separate operators (Hendrycks and Gimpel 2016), against one operator."""
    x = random_tensor(trial.shape, getattr(torch, trial.dtype), device=scene.device).requires_grad_(trial.backward)

    def tanh_written_out() -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    def erf_written_out() -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    now = tanh_written_out if trial.kind == "tanh" else erf_written_out

    def cured() -> Tensor:
        return F.gelu(x, approximate="tanh" if trial.kind == "tanh" else "none")

    error = largest_relative_error(now, cured)
    return timed_passes(trial, now, cured, scene, inputs=(x,), backward=trial.backward, error=error)


TRIAL: Final = TrialEntry(TimeActivation, run)
