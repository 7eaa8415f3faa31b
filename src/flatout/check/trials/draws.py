"""The mask of a dropout on a CPU: PyTorch's draws, against the same by vector instructions."""

from __future__ import annotations

from typing import Final

import torch

from flatout.blocks.training.vectorised_draws import draw_bernoulli, draws_refusal
from flatout.check.trials.context import Refused, Scene, TrialEntry
from flatout.check.trials.timing import timed_trial
from flatout.core.records.trial import TimeDraws, TrialResult

_CHANCE: Final = 0.5
"""Neither draw depends on it."""


def run(trial: TimeDraws, scene: Scene) -> TrialResult:
    """Both fill the same tensor, from generators of their own."""
    refusal = draws_refusal()
    if refusal:
        raise Refused(refusal)
    mask = torch.empty(trial.num_elements, dtype=getattr(torch, trial.dtype))
    plain, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    return timed_trial(
        trial,
        lambda: mask.bernoulli_(_CHANCE, generator=plain),
        lambda: draw_bernoulli(mask, _CHANCE, other),
        scene,
    )


TRIAL: Final = TrialEntry(TimeDraws, run)
