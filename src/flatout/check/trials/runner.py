"""Runs trials one after another within a budget; a trial that fails refuses, and costs nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from time import perf_counter
from typing import Any, Final

from flatout.check.trials.context import Refused, Scene, TrialEntry, untouched
from flatout.check.trials.time_limit import OutOfTime, time_limit
from flatout.core.records.trial import Trial, TrialResult
from flatout.core.registry import constants

_PACKAGE: Final = "flatout.check.trials"
_LEAST_S: Final = 0.3
"""With less time than this left no trial can repeat what it times."""


@cache
def trials_by_request() -> dict[type, TrialEntry[Any]]:
    """The constants TRIAL of the modules beside this one, by the type of request that they run."""
    entries: list[TrialEntry[Any]] = constants(_PACKAGE, "TRIAL")
    return {entry.request: entry for entry in entries}


def run_trials(
    trials: Iterable[Trial],
    scene: Scene,
    *,
    budget_s: float,
    compile_budget_s: float = 0.0,
    is_hurried: Callable[[], bool] = lambda: False,
) -> tuple[TrialResult, ...]:
    """Results in the order in which they were run; what the budget does not reach is refused with that reason.

    None goes on past the budget: it is interrupted there. Those that compile come last and have a budget of their own besides
    what is left. Once `is_hurried`, no further one is begun.
    """
    end = perf_counter() + budget_s
    results = []
    for trial in sorted(trials, key=lambda t: trials_by_request()[type(t)].is_last):
        is_last = trials_by_request()[type(trial)].is_last
        left_s = end + is_last * compile_budget_s - perf_counter()
        if is_hurried():
            results.append(TrialResult(trial=trial, refused="the script was ended", is_out_of_time=True))
        elif left_s < _LEAST_S:
            why = f"the {budget_s:.0f} s for trials were spent"
            results.append(TrialResult(trial=trial, refused=why, is_out_of_time=True))
        else:
            limited = scene._replace(limit_s=min(scene.limit_s, left_s), left_s=left_s)
            with untouched():
                results.append(_run(trial, limited))
    return tuple(results)


def _run(trial: Trial, scene: Scene) -> TrialResult:
    entry = trials_by_request()[type(trial)]
    try:
        # Those that compile end themselves in time: a compiler that is interrupted twice is left in a bad state.
        with nullcontext() if entry.is_last else time_limit(scene.left_s):
            return entry.run(trial, scene)
    except OutOfTime:
        return TrialResult(
            trial=trial, refused="it was given up when the time for trials was over", is_out_of_time=True
        )
    except Refused as e:
        return TrialResult(trial=trial, refused=str(e))
    except Exception as e:  # noqa: BLE001  # a trial runs user code on a copy; whatever it raises costs the trial alone
        return TrialResult(trial=trial, refused=f"it failed ({type(e).__name__}: {str(e)[:100]})")
