"""Replays of recorded operators: as they were, and in another dtype."""

from __future__ import annotations

from typing import Any

import torch

from flatout.measure.timer import compare
from flatout.profiling.operators.recorder import Example, TensorMeta
from flatout.profiling.trials.scene import Refused, Scene, random_tensor
from flatout.records.trial import TimeInDtype, TrialResult


def run(trial: TimeInDtype, scene: Scene) -> TrialResult:
    """Seconds of all named operators in a step, in the old dtype and in the new."""
    old, new = getattr(torch, trial.old), getattr(torch, trial.new)
    now_s = cured_s = 0.0
    spread = 0.0
    num_refused = 0
    share_s = scene.limit_s / max(1, len(trial.operators))
    for index in trial.operators:
        example = scene.examples[index]
        try:
            if example is None:
                raise Refused("the call was not kept")
            before, after = _call(example, old, old, scene.device), _call(example, old, new, scene.device)
            timings = compare(
                {"old": before, "new": after},
                device=scene.device,
                min_time_s=min(0.05, share_s / 4),
                max_time_s=min(0.5, share_s),
            )
        except (Refused, RuntimeError, TypeError, NotImplementedError, IndexError, ValueError):
            num_refused += 1
            continue
        now_s += timings["old"].call_s.value * scene.num_calls[index]
        cured_s += timings["new"].call_s.value * scene.num_calls[index]
        spread = max(spread, timings["old"].spread or 0.0)
    if num_refused == len(trial.operators):
        return TrialResult(trial=trial, refused="none of the operators could be replayed")
    return TrialResult(trial=trial, now_s=now_s, cured_s=cured_s, spread_fraction=spread)


def _call(example: Example, old: torch.dtype, new: torch.dtype, device: str) -> Any:
    args = [_make(a, old, new, device) for a in example.args]
    kwargs = {k: _make(v, old, new, device) for k, v in example.kwargs.items()}

    def call() -> object:
        with torch.no_grad():
            return example.func(*args, **kwargs)

    call()
    return call


def _make(value: Any, old: torch.dtype, new: torch.dtype, device: str) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], TensorMeta):
        meta, stride = value
        dtype = new if meta.dtype == old else meta.dtype
        return random_tensor(meta.shape, dtype, device=device if meta.device != "cpu" else "cpu", stride=stride)
    if isinstance(value, torch.dtype):
        return new if value == old else value
    if isinstance(value, list):
        return [_make(v, old, new, device) for v in value]
    return value
