"""A forward pass builds a graph that no backward uses.

Costs        The recording of every operator, and the memory of all saved activations until the result is dropped.
Evidence     Calls of a module with gradients enabled whose output no backward ever reached. Trial: the same call under no_grad.
Levers       graph.inference-mode
False alarm  Calls whose graph is used later (log-probabilities of a rollout): autograd itself tells whether a backward came.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, kept_fraction, result_of
from flatout.records.evidence import Evidence, Model
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel

_FEWEST_CALLS = 3


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time each such call under no_grad."""
    for index, model in enumerate(evidence.models):
        if _is_unused(model):
            yield _trial_of(index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for index, model in enumerate(evidence.models):
        result = result_of(evidence, _trial_of(index))
        if not _is_unused(model) or result is None:
            continue
        cost_s = model.calls * model.call_s
        if model.calls < 0.5 and evidence.steps.evaluation_s:
            cost_s = min(cost_s, evidence.steps.evaluation_s)
        kept = kept_fraction(result)
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=evidence.source_of(model.source),
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - kept), 0.2),
            because=f"{model.name} was called here {model.num_calls_seen} times with gradients on and no backward followed; under "
            f"no_grad a call takes {kept:.0%} (tried)",
            edit="with torch.no_grad(): (or torch.inference_mode()) around this loop",
            levers=RULE.levers,
            measured=True,
        )


def _is_unused(model: Model) -> bool:
    return model.num_graphs_built >= _FEWEST_CALLS and model.num_graphs_used == 0


def _trial_of(index: int) -> TimeModel:
    return TimeModel(model=index, variant="without-graph", backward=False)


RULE = Rule(
    id="run.evaluation-graph",
    title="A forward pass whose graph nobody uses",
    module=__name__,
    check=check,
    propose=propose,
    levers=("graph.inference-mode",),
)
