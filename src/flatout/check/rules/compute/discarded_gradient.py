"""Gradients are computed for a network and cleared before its optimizer steps.

Costs        The backward through that network: all of it where nothing behind it is trained by this loss (a critic's step whose
             fake samples were not detached from the generator), its weights' part where the gradient must go through it.
Evidence     Backward passes of the deep steps whose gradients one optimizer used and another cleared without a step.
Levers       none
False alarm  Gradients that are read by hand before they are cleared (a penalty on their norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import around, facts_named, milliseconds

_EDITS: Final = {
    "all": "detach its result before the other network gets it ({module}(...).detach()), or compute it under torch.no_grad()",
    "weights": "switch its parameters' gradients off for this loss: {module}.requires_grad_(False) before the forward pass, "
    "requires_grad_(True) after the backward",
}
_REASONS: Final = {
    "all": "nothing that this loss trains lies behind it",
    "weights": "the gradient must go through it, its own parameters' need not be computed",
}


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per network and line of its call."""
    backward_s = evidence.steps.phases.get("backward", 0.0)
    for fact in facts_named(evidence, "discarded-gradient"):
        how, fraction = fact.text.split(",")
        cost_s = float(fraction) * backward_s
        yield Finding(
            where=evidence.source_of(fact.source),
            cost_s=cost_s,
            saved_s=around(cost_s, 0.15),
            because=f"{fact.value:.0f} times a step the backward computes gradients of {fact.module} that are cleared before its "
            f"optimizer steps, {milliseconds(cost_s)}; {_REASONS[how]}",
            edit=_EDITS[how].format(module=fact.module.partition(" ")[0].lower()),
            module=fact.module,
            basis="timed",
        )


RULE = rule(__name__, check, title="Gradients that are cleared unused")
