"""Gradients of one result are taken in several walks through its graph, where one walk gives them all.

Costs        Each `torch.autograd.grad(u, x)` walks the whole graph behind u; asking for x, y and t one after the other walks it
             three times, and with create_graph=True the final backward goes through three graphs.
Evidence     Calls of torch.autograd.grad in the deep steps that start from the very same result, for different tensors, with the
             time of their operators.
Levers       graph.merge-gradients
False alarm  The same gradient asked for twice, gradients of different results, different grad_outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import facts_named, milliseconds

_AGAIN: Final = " and the backward through what they built"


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that takes gradients."""
    backward_s = evidence.steps.phases.get("backward", 0.0)
    for fact in facts_named(evidence, "repeated-gradient"):
        results, walks_fraction, spared_fraction, is_graph = (float(part) for part in fact.text.split(","))
        # The final backward goes through what the walks built: the fewer walks, the less there is of it.
        again_s = (1 - walks_fraction) * backward_s if is_graph else 0.0
        remaining = results / fact.value
        spared_s = spared_fraction * backward_s
        yield Finding(
            where=evidence.source_of(fact.source),
            cost_s=walks_fraction * backward_s + again_s,
            saved_s=(spared_s + 0.6 * again_s * (1 - remaining), spared_s + again_s * (1 - remaining)),
            because=f"{fact.value:.0f} walks a step through the graphs of {results:.0f} result(s), "
            f"{milliseconds(walks_fraction * backward_s)}{_AGAIN if is_graph else ''}; one walk a result gives the same "
            f"gradients ({1 - remaining:.0%} fewer)",
            edit="ask for all of a result's gradients in one call: torch.autograd.grad(u.sum(), (x, y, t), create_graph=True)",
            phases=("backward",),
        )


RULE = rule(__name__, check, title="One graph walked several times for its gradients", rewrites_line=True)
