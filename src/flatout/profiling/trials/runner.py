"""Runs trials one after another within a budget; a trial that fails refuses, and costs nothing but itself."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from flatout.profiling.trials import blocks, calls, compiled, dataset, foreach, model, operators, optimizer, workers
from flatout.profiling.trials.scene import Refused, Scene, untouched
from flatout.records.trial import (
    TimeAttention,
    TimeAttentionCall,
    TimeDataset,
    TimeDistance,
    TimeForeach,
    TimeGraphBreak,
    TimeGrowingCat,
    TimeInDtype,
    TimeMergedLinears,
    TimeModel,
    TimeNormalisation,
    TimeOneHot,
    TimeOptimizer,
    TimePaddedProduct,
    TimeRecurrence,
    TimeSparseEmbedding,
    TimeStackedLinears,
    TimeStrides,
    TimeWorkers,
    Trial,
    TrialResult,
)


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
        match trial:
            case TimeInDtype():
                return operators.run(trial, scene)
            case TimeAttention():
                return blocks.attention(trial, scene)
            case TimeGrowingCat():
                return blocks.growing_cat(trial, scene)
            case TimeRecurrence():
                return blocks.recurrence(trial, scene)
            case TimeNormalisation():
                return blocks.normalisation(trial, scene)
            case TimeDistance():
                return blocks.distance(trial, scene)
            case TimeOneHot():
                return blocks.one_hot(trial, scene)
            case TimeOptimizer():
                return optimizer.run(trial, scene)
            case TimeModel(variant="eager"):
                return compiled.eager(trial, scene)
            case TimeModel():
                return model.run(trial, scene)
            case TimePaddedProduct():
                return blocks.padded_product(trial, scene)
            case TimeGraphBreak():
                return compiled.graph_break(trial, scene)
            case TimeDataset():
                return dataset.run(trial, scene)
            case TimeAttentionCall():
                return calls.attention_call(trial, scene)
            case TimeMergedLinears():
                return calls.merged_linears(trial, scene)
            case TimeStackedLinears():
                return calls.stacked_linears(trial, scene)
            case TimeForeach():
                return foreach.run(trial, scene)
            case TimeSparseEmbedding():
                return calls.sparse_embedding(trial, scene)
            case TimeStrides():
                return calls.strides(trial, scene)
            case TimeWorkers():
                return workers.run(trial, scene)
    except Refused as e:
        return TrialResult(trial=trial, refused=str(e))
    except Exception as e:  # noqa: BLE001  # a trial runs user code on a copy; whatever it raises costs the trial alone
        return TrialResult(trial=trial, refused=f"it failed ({type(e).__name__}: {str(e)[:100]})")
