"""Gradients are computed for parameters that no optimizer updates.

Costs        The backward through a body that is frozen only by not being given to the optimizer, and the memory of its gradients.
Evidence     Parameters that receive a gradient but are in no optimizer that steps. Trial: forward and backward with those
             parameters not requiring gradients.
Levers       workload.freeze
False alarm  An optimizer that steps rarely and had not stepped yet.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, kept_fraction, model_seconds, result_of
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel

_WORTH_A_TRIAL = 0.03


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Freeze the unused parameters of the largest training module."""
    if any(u.seconds > _WORTH_A_TRIAL * evidence.steps.step_s for u in evidence.unused_gradients):
        trial = _trial_of(evidence)
        if trial is not None:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all unused gradients."""
    trial = _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None else None
    for unused in evidence.unused_gradients:
        saved_s = (0.8 * unused.seconds, unused.seconds)
        if result is not None:
            saved_s = around(model_seconds(evidence) * (1 - kept_fraction(result)), 0.15)
        yield Finding(
            rule=RULE.id,
            regime="compute",
            where=evidence.source_of(unused.source),
            cost_s=unused.seconds,
            saved_s=saved_s,
            because=f"{unused.num_tensors} parameters ({unused.num_elements / 1e6:.2f} M) get gradients but no optimizer "
            f"holds them; their backward takes {unused.seconds * 1e3:.2f} ms a step",
            edit="run the frozen part under torch.no_grad(), or body.requires_grad_(False) once before training",
            module=unused.modules[0] if unused.modules else "",
            levers=RULE.levers,
            operators=unused.operators,
            measured=result is not None,
        )


def _trial_of(evidence: Evidence) -> TimeModel | None:
    training = [i for i, m in enumerate(evidence.models) if m.is_training and m.num_graphs_used]
    if not training or not evidence.unused_gradients:
        return None
    largest = max(training, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls)
    return TimeModel(model=largest, variant="frozen", backward=True)


RULE = Rule(
    id="compute.unused-gradient",
    title="Gradients that no optimizer uses",
    module=__name__,
    check=check,
    propose=propose,
    levers=("workload.freeze",),
)
