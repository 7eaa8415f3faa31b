"""The same module is run twice on the same input in one step.

Costs        The second call, and its backward where a backward goes through its graph.
Evidence     Calls of a root module in the deep steps whose inputs, outputs and weights are bit for bit those of an earlier call
             of the step, and that draw no random numbers. The price is the second call's own time in undisturbed steps. So too a
             module inside others (an encoder that actor and critic share) that is given the very same tensors again; its
             price is the time of its operators in a call, with the backward's for repeats that may have a graph.
Levers       graph.reuse-result
False alarm  Two passes with different dropout over one input (contrastive learning): they draw random numbers and differ. Two
             calls whose graphs two backward passes go through: the first would free what the second needs, so that is a note.
             A layer inside a package's module: nobody can hand it a result, so that is a note, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Model
from flatout.core.records.finding import Finding, Note
from flatout.core.records.usage import ModuleFact
from flatout.machine.cost.accounting import around, facts_named, milliseconds

_EDITS: Final = {
    "": "keep the result of the first call and use it here",
    "detach": "keep the result of the first call and use its .detach() here",
    "no-graph": "keep the result of one call for both, outside no_grad, and use its .detach() where the first one is now",
}
"""By how the first result can be used again (`graph_passes.Reuse`)."""
_INSIDE: Final = "double-forward-inside"
_WITHOUT_GRADIENT: Final = ("no_grad", "evaluation", "rollout")
"""Phases whose calls build no graph."""
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
    for fact in facts_named(evidence, _INSIDE):
        source = evidence.source_of(fact.source)
        if source is not None and source.library:
            yield Note(
                where=source,
                text=f"{fact.module}, a layer inside what this line calls ({source.library}), runs again {_times(fact)} a step "
                f"on tensors it has already been given, with the same weights, {milliseconds(_repeats_s(evidence, fact)[1])} a "
                "step; where the whole call gets the same input, keep its result",
            )


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that repeats a call."""
    for fact in facts_named(evidence, _INSIDE):
        source = evidence.source_of(fact.source)
        if source is None or not source.library:
            yield _inside(evidence, fact)
    for fact in facts_named(evidence, "double-forward"):
        models = [m for m in evidence.models if m.source == fact.source and m.name == fact.module]
        calls = sum(m.calls for m in models)
        if not calls:
            continue
        repeated = min(fact.value, calls)
        forward_s = repeated * sum(m.calls * m.call_s for m in models) / calls
        cost_s = forward_s + _backward_s(evidence, fact, models)
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
    least_s, cost_s = _repeats_s(evidence, fact)
    passes = "forward and backward" if cost_s > _repeats_s(evidence, fact, backward=False)[1] else "the forward"
    return Finding(
        where=evidence.source_of(fact.source),
        cost_s=cost_s,
        saved_s=(around(least_s, 0.1)[0], around(cost_s, 0.1)[1]),
        because=f"{fact.module} is called {_times(fact)} a step on tensors it has already been given in this step, with the same "
        f"weights, and returns the same result bit for bit; {passes} of that {milliseconds(cost_s)} a step",
        edit="run it once, before both that use it, and hand its result to them",
        module=fact.module,
    )


def _repeats_s(evidence: Evidence, fact: ModuleFact, *, backward: bool = True) -> tuple[float, float]:
    """Seconds of a step in the repeated calls of a module inside others, at least and at most: some may have a backward.

    Equal calls are alike in whether gradients are on. So of `n` calls with gradients at most `n - 1` are repeats, unless the
    module is also called by another path.
    """
    own = 0.0 if _has_other_path(evidence, fact) else 1.0
    rows = [o for o in evidence.operators if f"{o.module}.".startswith(f"{fact.module}.")]
    forward = [o for o in rows if o.phase not in ("backward", "optimizer")]
    backward_s = sum(o.total_s for o in rows if o.phase == "backward") if backward else 0.0
    num_all, repeats = float(fact.text), min(fact.value, float(fact.text))
    total = sum(o.num_calls for o in forward)
    without = sum(o.num_calls for o in forward if o.phase in _WITHOUT_GRADIENT)
    num_graphs = num_all * (1.0 - without / total) if total and backward_s else 0.0
    forward_s = sum(o.total_s for o in forward) * repeats / num_all
    most = min(repeats, max(0.0, num_graphs - own)) if without else min(repeats, num_graphs)
    least = max(0.0, min(most, repeats - max(0.0, num_all - num_graphs - own))) if without else most
    per_call_s = backward_s / num_graphs if num_graphs else 0.0
    return forward_s + least * per_call_s, forward_s + most * per_call_s


def _has_other_path(evidence: Evidence, fact: ModuleFact) -> bool:
    """Whether another module holds one of the same name, which may be this one."""
    name = fact.module.rpartition(".")[2]
    paths = {f"{o.module}." for o in evidence.operators}
    return any(f".{name}." in f".{path}" and not path.startswith(f"{fact.module}.") for path in paths)


def _backward_s(evidence: Evidence, fact: ModuleFact, models: list[Model]) -> float:
    """The repeated calls' part of the backward: only where a backward goes through both calls' graphs does one of them go.

    Where the result would be used detached the repeat has no backward; where the first call has no graph, it needs its own.
    """
    used = [m for m in evidence.models if m.num_graphs_used]
    with_graph = sum(m.calls for m in models if m.num_graphs_used)
    of_module = sum(m.calls for m in used if m.name == fact.module)
    repeats = min(fact.value, with_graph, max(0.0, of_module - 1.0)) if not fact.text else 0.0
    total_s = sum(m.calls * m.call_s for m in used)
    if not repeats or not total_s:
        return 0.0
    call_s = sum(m.calls * m.call_s for m in models if m.num_graphs_used) / with_graph
    return evidence.steps.phases.get("backward", 0.0) * min(1.0, repeats * call_s / total_s)


def _times(fact: ModuleFact) -> str:
    return "once" if fact.value <= 1.5 else f"{fact.value:.0f} times"


RULE = rule(__name__, check, note=note, title="A module run twice on the same input", rewrites_line=True)
