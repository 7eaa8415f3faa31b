"""Runs trials one after another within a budget; a trial that fails refuses, and costs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from time import perf_counter
from typing import Any, Final

from flatout.check.trials.context import Refused, Scene, TrialEntry, untouched
from flatout.core.records.trial import Trial, TrialResult
from flatout.core.registry import constants

_PACKAGE: Final = "flatout.check.trials"


@cache
def trials_by_request() -> dict[type, TrialEntry[Any]]:
    """The constants TRIAL of the modules beside this one, by the type of request that they run."""
    entries: list[TrialEntry[Any]] = constants(_PACKAGE, "TRIAL")
    return {entry.request: entry for entry in entries}


def run_trials(trials: Iterable[Trial], scene: Scene, *, budget_s: float) -> tuple[TrialResult, ...]:
    """Results in the order of the requests; what the budget does not reach is refused with that reason."""
    end = perf_counter() + budget_s
    results = []
    for trial in trials:
        left = end - perf_counter()
        if left <= 0:
            results.append(TrialResult(trial=trial, refused=f"the {budget_s:.0f} s for trials were spent"))
            continue
        with untouched():
            results.append(_run(trial, scene._replace(limit_s=min(scene.limit_s, left))))
    return tuple(results)


def _run(trial: Trial, scene: Scene) -> TrialResult:
    try:
        return trials_by_request()[type(trial)].run(trial, scene)
    except Refused as e:
        return TrialResult(trial=trial, refused=str(e))
    except Exception as e:  # noqa: BLE001  # a trial runs user code on a copy; whatever it raises costs the trial alone
        return TrialResult(trial=trial, refused=f"it failed ({type(e).__name__}: {str(e)[:100]})")
