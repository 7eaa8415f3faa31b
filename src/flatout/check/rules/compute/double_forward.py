"""The same module is run twice on the same input in one step.

Costs        The second call, and its backward where its graph is used.
Evidence     Calls of a root module in the deep steps whose inputs, outputs and weights are bit for bit those of an earlier call
             of the step, and that draw no random numbers. The price is the second call's own time in undisturbed steps. So too a
             module inside others (an encoder that actor and critic share) that is given the very same tensors again; its
             price is the time of its operators, forward and backward.
Levers       graph.reuse-result
False alarm  Two passes with different dropout over one input (contrastive learning): they draw random numbers and differ. Two
             calls whose graphs two backward passes go through: the first would free what the second needs, so that is a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Model
from flatout.core.records.finding import Finding, Note
from flatout.core.records.usage import ModuleFact
from flatout.machine.cost.accounting import around, facts_named, milliseconds, operator_seconds

_EDITS: Final = {
    "": "keep the result of the first call and use it here",
    "detach": "keep the result of the first call and use its .detach() here",
    "no-graph": "keep the result of one call for both, outside no_grad, and use its .detach() where the first one is now",
}
"""By how the first result can be used again (`graph_passes.Reuse`)."""
_FREED: Final = ("double-forward-freed", "double-forward-inside-freed")


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per repeated call whose first result is of no use: keeping it would crash in the second backward."""
    for name in _FREED:
        for fact in facts_named(evidence, name):
            yield Note(
                where=evidence.source_of(fact.source),
                text=f"{fact.module} is called {_times(fact)} a step on an input it has already been given and returns the "
                "same result, but a backward frees the first graph before this one is needed; where the first call's "
                "gradients are not needed, use its result detached there, and again here",
            )


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that repeats a call."""
    for fact in facts_named(evidence, "double-forward-inside"):
        yield _inside(evidence, fact)
    for fact in facts_named(evidence, "double-forward"):
        models = [m for m in evidence.models if m.source == fact.source and m.name == fact.module]
        calls = sum(m.calls for m in models)
        if not calls:
            continue
        repeated = min(fact.value, calls)
        forward_s = repeated * sum(m.calls * m.call_s for m in models) / calls
        cost_s = forward_s + _backward_s(evidence, models, forward_s)
        first = next((m for m in evidence.models if m.name == fact.module and m.source != fact.source), None)
        also = evidence.source_of(first.source) if first is not None else None
        yield Finding(
            where=evidence.source_of(fact.source),
            cost_s=cost_s,
            saved_s=around(cost_s, 0.1),
            because=f"{fact.module} is called {_times(fact)} a step on an input it has already been given, with the same "
            f"weights, and returns the same result bit for bit; {milliseconds(cost_s)} a step",
            edit=_EDITS[fact.text],
            also=(also,) if also is not None else (),
            module=fact.module,
        )


def _inside(evidence: Evidence, fact: ModuleFact) -> Finding:
    rows = tuple(i for i, o in enumerate(evidence.operators) if f"{o.module}.".startswith(f"{fact.module}."))
    cost_s = operator_seconds(evidence, rows) * min(1.0, fact.value / float(fact.text))
    return Finding(
        where=evidence.source_of(fact.source),
        cost_s=cost_s,
        saved_s=around(cost_s, 0.1),
        because=f"{fact.module} is called {_times(fact)} a step on tensors it has already been given in this step, with the same "
        f"weights, and returns the same result bit for bit; forward and backward of that {milliseconds(cost_s)} a step",
        edit="run it once, before both that use it, and hand its result to them",
        module=fact.module,
    )


def _backward_s(evidence: Evidence, models: list[Model], forward_s: float) -> float:
    """The repeated calls' part of the backward: their share of the calls whose graphs are used."""
    if not any(m.num_graphs_used for m in models):
        return 0.0
    total_s = sum(m.calls * m.call_s for m in evidence.models if m.num_graphs_used)
    return evidence.steps.phases.get("backward", 0.0) * min(1.0, forward_s / total_s) if total_s else 0.0


def _times(fact: ModuleFact) -> str:
    return "once" if fact.value <= 1.5 else f"{fact.value:.0f} times"


RULE = rule(__name__, check, note=note, title="A module run twice on the same input", rewrites_line=True)
