"""What is at stake in a trial: which of those that the rules propose come first, while there is time for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Rule
from flatout.core.records.trial import TimeDataset, TimeModel, TimeOptimizer, TimeWorkers, Trial, TrialResult

_LEFT: Final = 1e-3
"""Of the time, what a cure leaves that does all that is hoped for; nothing at all would be divided by."""
_HOPED: Final = {"repeatable": True, "takes_batches": True, "item_by_item": True}
"""What a data set is hoped to be."""
_WITH_BACKWARD: Final = 3.0
"""Forward and backward take so many times the forward: the backward computes two products for each of its (Kaplan 2020)."""
_MODEL_CALLS: Final = 12
_OPTIMIZER_STEPS: Final = 33
"""Calls that a trial makes of two variants, of three: one to warm up and eleven rounds, where the limits allow it."""
_COST_S: Final = 0.8
_MODEL_S: Final = (0.8, 5.0)
_OPTIMIZER_S: Final = (0.4, 3.0)
_DATASET_S: Final = 1.5
_WORKERS_S: Final = 1.5
"""What trials take: on what was captured of operators, of a module, of an optimizer, of a data set, for a number of workers."""


class Proposal(NamedTuple):
    """A trial, the seconds of a step that its rules would save if the cure did all that is hoped for, and what it takes."""

    trial: Trial
    stake_s: float
    cost_s: float


def proposals(evidence: Evidence, rules: Iterable[Rule]) -> tuple[Proposal, ...]:
    """The trials that would price what the rules suspect, each once: those with most at stake for their time first."""
    stakes: dict[Trial, float] = {}
    if evidence.steps.num_timed:
        for rule in rules:
            for trial in rule.propose(evidence) if rule.propose is not None else ():
                stakes[trial] = max(stakes.get(trial, 0.0), _stake_s(trial, rule, evidence))
    found = [Proposal(trial, stake_s, _cost_s(trial, evidence)) for trial, stake_s in stakes.items()]
    return tuple(sorted(found, key=lambda p: -p.stake_s / p.cost_s))


def proposed_trials(evidence: Evidence, rules: Iterable[Rule]) -> tuple[Trial, ...]:
    """The trials alone, in the same order."""
    return tuple(proposal.trial for proposal in proposals(evidence, rules))


def _stake_s(trial: Trial, rule: Rule, evidence: Evidence) -> float:
    """What the rule would report to be saved if the cure left next to nothing, less what it reports without the trial."""
    others = tuple(result for result in evidence.trials if result.trial != trial)
    without = msgspec.structs.replace(evidence, trials=others)
    with_it = msgspec.structs.replace(evidence, trials=(*others, _hoped(trial, evidence.steps.whole_s)))
    try:
        more_s = _saved_s(rule, with_it) - _saved_s(rule, without)
    except (ArithmeticError, LookupError, ValueError):  # the rule reads more of a result than can be hoped for
        return 0.0
    return min(max(more_s, 0.0), evidence.steps.whole_s)


def _hoped(trial: Trial, whole_s: float) -> TrialResult:
    counts = trial.counts if isinstance(trial, TimeWorkers) else ()
    return TrialResult(
        trial=trial,
        now_s=whole_s,
        cured_s=_LEFT * whole_s,
        variant=str(max(counts, default="")),
        parts={str(count): whole_s for count in counts},
        facts=_HOPED,
    )


def _saved_s(rule: Rule, evidence: Evidence) -> float:
    return sum(finding.saved_s[1] for finding in rule.check(evidence))


def _cost_s(trial: Trial, evidence: Evidence) -> float:
    """Seconds that the trial takes, roughly."""
    if isinstance(trial, TimeModel) and trial.model < len(evidence.models):
        call_s = evidence.models[trial.model].call_s * (_WITH_BACKWARD if trial.backward else 1.0)
        return _within(_MODEL_CALLS * call_s * trial.num_live_outputs, _MODEL_S)
    if isinstance(trial, TimeOptimizer) and trial.optimizer < len(evidence.optimizers):
        return _within(_OPTIMIZER_STEPS * evidence.optimizers[trial.optimizer].step_s, _OPTIMIZER_S)
    if isinstance(trial, TimeDataset):
        return _DATASET_S
    return _WORKERS_S * (1 + len(trial.counts)) if isinstance(trial, TimeWorkers) else _COST_S


def _within(seconds: float, limits: tuple[float, float]) -> float:
    return min(max(seconds, limits[0]), limits[1])
