"""A matrix product, against the same with padded sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimePaddedProduct, TrialResult


def run(trial: TimePaddedProduct, scene: Scene) -> TrialResult:
    """The product at its sizes, against the same padded; forward alone, since the backward's products are rows of their own."""
    dtype = getattr(torch, trial.dtype)

    def product(rows: int, inner: int, columns: int) -> Callable[[], Tensor]:
        a = _factor(trial.batch, rows, inner, dtype, scene.device, is_transposed=trial.transposed[0])
        b = _factor(trial.batch, inner, columns, dtype, scene.device, is_transposed=trial.transposed[1])
        return lambda: a @ b

    now, cured = product(trial.rows, trial.inner, trial.columns), product(*trial.padded)
    return timed_passes(trial, now, cured, scene, inputs=(), backward=False)


def _factor(batch: int, rows: int, columns: int, dtype: torch.dtype, device: str, *, is_transposed: bool) -> Tensor:
    lead = (batch,) if batch > 1 else ()
    if is_transposed:
        return random_tensor((*lead, columns, rows), dtype, device=device).transpose(-2, -1)
    return random_tensor((*lead, rows, columns), dtype, device=device)


TRIAL: Final = TrialEntry(TimePaddedProduct, run)
