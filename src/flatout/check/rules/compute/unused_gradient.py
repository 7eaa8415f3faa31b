"""Gradients are computed for parameters that no optimizer updates.

Costs        The backward through a body that is frozen only by not being given to the optimizer, and the memory of its gradients.
Evidence     Parameters that receive a gradient but are in no optimizer that steps. Trial: forward and backward with those
             parameters not requiring gradients; of a module that is not trained at all (a teacher), its forward under no_grad,
             unless a gradient goes through it to its inputs.
Levers       workload.freeze
False alarm  An optimizer that steps rarely and had not stepped yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, UnusedGradient
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import around, model_seconds, remaining_fraction, result_of

_WORTH_A_TRIAL = 0.03
_WHOLE = "run it under torch.no_grad(): a teacher or target needs no gradients"
_PART = "requires_grad_(False) on these modules once before training; a gradient that goes through them still does"
"""Safe where no_grad would cut off what lies before: a loss of features, a frozen part in the middle."""


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Run a module that is not trained at all without a graph; freeze the unused parameters of one that is trained in part."""
    for unused in evidence.unused_gradients:
        trial = _trial_of(evidence, unused)
        if trial is not None and unused.seconds > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per root module with unused gradients."""
    for unused in evidence.unused_gradients:
        trial = _trial_of(evidence, unused)
        result = result_of(evidence, trial)
        cost_s, saved_s = unused.seconds, (0.8 * unused.seconds, unused.seconds)
        if trial is not None and result is not None:
            if unused.is_whole:
                model = evidence.models[trial.model]
                cost_s = model.calls * model.call_s + unused.seconds
                saved_s = around(cost_s * (1 - remaining_fraction(result)), 0.15)
            else:
                saved_s = around(model_seconds(evidence) * (1 - remaining_fraction(result)), 0.15)
        yield Finding(
            where=evidence.source_of(unused.source),
            cost_s=max(unused.seconds, saved_s[1]),
            saved_s=saved_s,
            because=f"{unused.num_tensors} parameters ({unused.num_elements / 1e6:.2f} M) get gradients but no optimizer "
            f"holds them; their backward takes {unused.seconds * 1e3:.2f} ms a step",
            edit=_WHOLE if unused.is_whole and result is not None else _PART,
            module=_module_of(unused),
            operators=unused.operators,
            basis="trial" if result is not None else "estimate",
        )


def _module_of(unused: UnusedGradient) -> str:
    first = unused.modules[0] if unused.modules else ""
    return first.partition(".")[0] if unused.is_whole else first


def _trial_of(evidence: Evidence, unused: UnusedGradient) -> TimeModel | None:
    training = [i for i, m in enumerate(evidence.models) if m.num_graphs_used and (m.is_training or unused.is_whole)]
    if unused.is_whole and unused.modules:
        training = [i for i in training if evidence.models[i].name == unused.modules[0].partition(".")[0]]
    if not training:
        return None
    largest = max(training, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls)
    return TimeModel(model=largest, variant="without-graph" if unused.is_whole else "frozen", backward=True)


RULE = rule(__name__, check, propose=propose, title="Gradients that no optimizer uses")
