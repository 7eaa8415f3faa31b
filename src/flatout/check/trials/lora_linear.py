"""A linear layer and its low-rank adapter, apart and as one product."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.lora_linear.merged import merged_lora_linear
from flatout.blocks.kernels.lora_linear.reference import reference_lora_linear
from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeLoraLinear, TrialResult


def run(trial: TimeLoraLinear, scene: Scene) -> TrialResult:
    """Layer and adapter apart, and with the adapter added to the weight."""
    dtype = getattr(torch, trial.dtype)

    def random(*shape: int, is_trained: bool = True) -> Tensor:
        return random_tensor(shape, dtype, device=scene.device).requires_grad_(trial.backward and is_trained)

    x = random(trial.rows, trial.in_features)
    weight = random(trial.out_features, trial.in_features, is_trained=not trial.frozen)
    down, up = random(trial.rank, trial.in_features), random(trial.out_features, trial.rank)
    bias = random(trial.out_features, is_trained=not trial.frozen) if trial.bias else None
    separate, merged = (
        partial(f, x, weight, down, up, bias, scale=2.0) for f in (reference_lora_linear, merged_lora_linear)
    )
    inputs = tuple(t for t in (x, weight, down, up, bias) if t is not None and t.requires_grad)
    return timed_passes(trial, separate, merged, scene, inputs=inputs, cured_inputs=inputs, backward=trial.backward)


TRIAL: Final = TrialEntry(TimeLoraLinear, run)
