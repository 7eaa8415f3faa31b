"""A forward pass builds a graph that no backward uses.

Costs        The recording of every operator, and the memory of all saved activations until the result is dropped.
Evidence     Calls of a module with gradients enabled whose output no backward ever reached. Trial: the same call under no_grad.
Levers       graph.inference-mode
False alarm  Calls whose graph is used later (log-probabilities of a rollout): autograd itself tells whether a backward came.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, group_by, kept_fraction, result_of
from flatout.records.evidence import Evidence, Model
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel

_FEWEST_CALLS = 3
_MOST_OF_EVALUATION = 0.6


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the heaviest such call of each place under no_grad."""
    for indices in _by_place(evidence).values():
        yield _trial_of(_heaviest(evidence, indices), len(indices))


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per place."""
    for place, indices in _by_place(evidence).items():
        result = result_of(evidence, _trial_of(_heaviest(evidence, indices), len(indices)))
        if result is None:
            continue
        models = [evidence.models[i] for i in indices]
        cost_s = _with_rest(evidence, sum(m.calls * m.call_s for m in models))
        kept = kept_fraction(result)
        names = " and ".join(dict.fromkeys(m.name for m in models))
        seen = max(m.num_calls_seen for m in models)
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=evidence.source_of(place),
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - kept), 0.2),
            because=f"{names} ran here {seen} times with gradients on and no backward followed, {cost_s * 1e3:.2f} ms a step on "
            f"average; under no_grad it takes {kept:.0%} (tried)",
            edit="with torch.no_grad(): (or torch.inference_mode()) around it",
            also=tuple(
                s for s in (evidence.source_of(m.source) for m in models[:1]) if s != evidence.source_of(place) and s
            ),
            levers=RULE.levers,
            basis="trial",
        )


def _with_rest(evidence: Evidence, calls_s: float) -> float:
    """The calls with what the evaluation does around them, where they are most of it: that builds a graph too."""
    evaluation_s = evidence.steps.phases.get("evaluation", 0.0)
    return max(calls_s, evaluation_s) if calls_s >= _MOST_OF_EVALUATION * evaluation_s else calls_s


def _by_place(evidence: Evidence) -> dict[int, list[int]]:
    """Unused calls by the innermost line that only they, and no call whose graph is used, run through."""
    used = {s for m in evidence.models if m.num_graphs_used for s in (m.source, *m.callers)}
    unused = [i for i, m in enumerate(evidence.models) if _is_unused(m)]

    def place(index: int) -> int:
        chain = (evidence.models[index].source, *evidence.models[index].callers)
        return next((s for s in chain if s not in used), chain[0])

    return group_by(unused, place)


def _heaviest(evidence: Evidence, indices: list[int]) -> int:
    return max(indices, key=lambda i: evidence.models[i].calls * evidence.models[i].call_s)


def _is_unused(model: Model) -> bool:
    return model.num_graphs_built >= _FEWEST_CALLS and model.num_graphs_used == 0


def _trial_of(index: int, held: int) -> TimeModel:
    return TimeModel(model=index, variant="without-graph", backward=False, held=held)


RULE = Rule(
    id="run.evaluation-graph",
    title="A forward pass whose graph nobody uses",
    module=__name__,
    check=check,
    propose=propose,
    levers=("graph.inference-mode",),
)
