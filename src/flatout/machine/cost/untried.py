"""What rules would say if trials that the time did not reach had gone as they usually do: for a search, which tries it itself."""

from __future__ import annotations

from typing import Final

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TimeDataset, TimeWorkers, TrialResult

_USUALLY_LEFT: Final = 0.5
"""Of the time of what a trial is about, what a cure is expected to leave: our guess, which a search replaces by a measurement."""


def as_if_tried(evidence: Evidence) -> Evidence | None:
    """The evidence with a result for each trial that ended for want of time alone; None where there was no such trial.

    Trials of data sets and workers stay as they are: they show what is safe to do with them, which is not to be guessed.
    """
    guessed = tuple(_usual(result, evidence.steps.whole_s) for result in evidence.trials)
    return None if guessed == evidence.trials else msgspec.structs.replace(evidence, trials=guessed)


def _usual(result: TrialResult, whole_s: float) -> TrialResult:
    if not result.is_out_of_time or isinstance(result.trial, (TimeDataset, TimeWorkers)):
        return result
    return TrialResult(trial=result.trial, now_s=whole_s, cured_s=_USUALLY_LEFT * whole_s)
