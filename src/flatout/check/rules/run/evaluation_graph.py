"""A forward pass builds a graph that no backward uses.

Costs        The recording of every operator, and the memory of all saved activations until the result is dropped.
Evidence     Calls of a module with gradients enabled whose output no backward ever reached. Trial: the same call under no_grad.
Levers       graph.inference-mode
False alarm  Calls whose graph is used later (log-probabilities of a rollout): autograd itself tells whether a backward came.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import around, group_by, remaining_fraction, result_of

_FEWEST_CALLS = 3
_MOST_OF_EVALUATION = 0.6


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the heaviest such call of each place under no_grad."""
    for indices in _by_place(evidence).values():
        yield _trial_of(evidence, indices)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per place."""
    for place, indices in _by_place(evidence).items():
        result = result_of(evidence, _trial_of(evidence, indices))
        if result is None:
            continue
        models = [evidence.models[i] for i in indices]
        cost_s = _with_rest(evidence, sum(m.calls * m.call_s for m in models))
        remaining = remaining_fraction(result)
        names = " and ".join(dict.fromkeys(m.name for m in models))
        num_calls = max(m.num_calls_observed for m in models)
        yield Finding(
            regime="bandwidth",
            where=evidence.source_of(place),
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - remaining), 0.2),
            because=f"{names} ran here {num_calls} times with gradients on and no backward followed, "
            f"{cost_s * 1e3:.2f} ms a step on average; under no_grad it takes {remaining:.0%} (tried)",
            edit="with torch.no_grad(): (or torch.inference_mode()) around it",
            also=evidence.sources_of((models[0].source,)),
            basis="trial",
        )


def _with_rest(evidence: Evidence, calls_s: float) -> float:
    """The calls with what the evaluation does around them, where they are most of it: that builds a graph too."""
    evaluation_s = evidence.steps.phases.get("evaluation", 0.0)
    return max(calls_s, evaluation_s) if calls_s >= _MOST_OF_EVALUATION * evaluation_s else calls_s


def _by_place(evidence: Evidence) -> dict[int, list[int]]:
    """Unused calls by the innermost line that only they, and no call whose graph is used, run through."""
    used = {s for m in evidence.models if m.num_graphs_used for s in (m.source, *m.callers)}
    built = (i for i, m in enumerate(evidence.models) if m.num_graphs_built >= _FEWEST_CALLS)
    unused = [i for i in built if evidence.models[i].num_graphs_used == 0]

    def place(index: int) -> int:
        callers = (evidence.models[index].source, *evidence.models[index].callers)
        return next((s for s in callers if s not in used), callers[0])

    return group_by(unused, place)


def _trial_of(evidence: Evidence, indices: list[int]) -> TimeModel:
    heaviest = max(indices, key=lambda i: evidence.models[i].calls * evidence.models[i].call_s)
    return TimeModel(model=heaviest, variant="without-graph", backward=False, num_live_outputs=len(indices))


RULE = rule(__name__, check, propose=propose, title="A forward pass whose graph nobody uses", rewrites_line=True)
