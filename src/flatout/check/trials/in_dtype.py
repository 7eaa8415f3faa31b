"""Replays of recorded operators: as they were, and in another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from flatout.check.observe.operators.recorder import Example
from flatout.check.trials.context import Refused, Scene, TrialEntry
from flatout.check.trials.replay import Dtypes, fresh_arguments
from flatout.core.records.trial import TimeInDtype, TrialResult
from flatout.machine.measure.timer import compare_times


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
                raise Refused("the call was not captured")
            before, after = _call(example, scene, {}), _call(example, scene, {old: new})
            timings = compare_times(
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


def _call(example: Example, scene: Scene, dtypes: Dtypes) -> Callable[[], object]:
    args, kwargs = fresh_arguments(example, scene, dtypes)

    def call() -> object:
        with torch.no_grad():
            return example.func(*args, **kwargs)

    call()
    return call


TRIAL: Final = TrialEntry(TimeInDtype, run)
