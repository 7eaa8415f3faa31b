"""A forward pass builds a graph that no backward uses.

Costs        The recording of every operator, and the memory of all saved activations until the result is dropped.
             On a CPU that memory goes back to the system and is faulted in anew each time, which can take most of the pass.
Evidence     Calls of a module with gradients enabled whose output no backward ever reached. Trial: the same call under no_grad.
             Where the kernel's own accounting explains why the call takes longer in the script than in the trial, what is left is
             told by the script's time: the trial's memory is there already.
Levers       graph.inference-mode
False alarm  Calls whose graph is used later (log-probabilities of a rollout): autograd itself tells whether a backward came.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel, TrialResult
from flatout.machine.cost.accounting import around, group_by, remaining_fraction, result_of

_FEWEST_CALLS = 3
_MOST_OF_EVALUATION = 0.6
_LONGER_IN_SCRIPT = 1.5
"""A call that takes so many times longer in the script than in the trial pays for something that the trial does not."""
_FAULTS_OF_IT = 0.5
"""The least part of that which page faults explain."""
_WITHOUT_GRAPH = (1.0, 2.0)
"""What a pass under no_grad takes in the script, in passes of the trial: it takes some memory anew as well (1.0 and 1.8, measured
on an EPYC of family 25, where the pass with a graph took seven times as long in the script as in the trial)."""


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
        low, high = _remaining(evidence, indices, result)
        names = " and ".join(dict.fromkeys(m.name for m in models))
        num_calls = max(m.num_calls_observed for m in models)
        yield Finding(
            regime="bandwidth",
            where=evidence.source_of(place),
            cost_s=cost_s,
            saved_s=(cost_s * max(0.0, 1 - high), cost_s * max(0.0, 1 - low)),
            because=f"{names} ran here {num_calls} times with gradients on and no backward followed, "
            f"{cost_s * 1e3:.2f} ms a step on average; under no_grad it takes {(low + high) / 2:.0%} (tried)",
            edit="with torch.no_grad(): (or torch.inference_mode()) around it",
            also=evidence.sources_of((models[0].source,)),
            basis="trial",
        )


def _remaining(evidence: Evidence, indices: list[int], result: TrialResult) -> tuple[float, float]:
    """What no_grad leaves of the calls' time."""
    ratio = remaining_fraction(result)
    least, most = around(max(0.0, 1 - ratio), 0.2)
    pages, heaviest = evidence.fresh_pages, evidence.models[_heaviest(evidence, indices)]
    in_script_s = len(indices) * heaviest.call_s
    if pages is None or not result.now_s or not result.cured_s or in_script_s < _LONGER_IN_SCRIPT * result.now_s:
        return 1 - most, 1 - least
    longer_s = heaviest.calls * (in_script_s - result.now_s)
    if pages.kernel_s < _FAULTS_OF_IT * longer_s:
        return 1 - most, 1 - least
    low, high = (min(1.0, factor * result.cured_s / in_script_s) for factor in _WITHOUT_GRAPH)
    return low, high


def _with_rest(evidence: Evidence, calls_s: float) -> float:
    """The evaluation with what it does around the calls, where they are most of it: that builds a graph too.

    Calls are timed in passes of their own, the evaluation in the step that the report is of: where both are one, that counts.
    """
    evaluation_s = evidence.steps.phases.get("evaluation", 0.0)
    is_one = _MOST_OF_EVALUATION * evaluation_s <= calls_s <= evaluation_s / _MOST_OF_EVALUATION
    return evaluation_s if is_one else calls_s


def _by_place(evidence: Evidence) -> dict[int, list[int]]:
    """Unused calls by the innermost line that only they, and no call whose graph is used, run through."""
    used = {s for m in evidence.models if m.num_graphs_used for s in (m.source, *m.callers)}
    built = (i for i, m in enumerate(evidence.models) if m.num_graphs_built >= _FEWEST_CALLS)
    unused = [i for i in built if evidence.models[i].num_graphs_used == 0]

    def place(index: int) -> int:
        callers = (evidence.models[index].source, *evidence.models[index].callers)
        return next((s for s in callers if s not in used), callers[0])

    return group_by(unused, place)


def _heaviest(evidence: Evidence, indices: list[int]) -> int:
    return max(indices, key=lambda i: evidence.models[i].calls * evidence.models[i].call_s)


def _trial_of(evidence: Evidence, indices: list[int]) -> TimeModel:
    heaviest = _heaviest(evidence, indices)
    return TimeModel(model=heaviest, variant="without-graph", backward=False, num_live_outputs=len(indices))


RULE = rule(__name__, check, propose=propose, title="A forward pass whose graph nobody uses", rewrites_line=True)
