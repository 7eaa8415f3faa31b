"""Gradients are computed for a network and cleared before its optimizer steps.

Costs        The backward through that network: all of it where nothing behind it is trained by this loss (a critic's step whose
             fake samples were not detached from the generator), its weights' part where the gradient must go through it.
Evidence     Backward passes of the deep steps whose gradients one optimizer used and another cleared without a step; for each of
             their operators, the parameters that its node of the graph leads to.
Levers       none
False alarm  Gradients that are read by hand before they are cleared (a penalty on their norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.usage import ModuleFact
from flatout.machine.cost.accounting import around, facts_named, milliseconds


class _DiscardedPart(NamedTuple):
    """Gradients of one network that are discarded in one way."""

    fact: ModuleFact
    how: str
    seconds: float


_EDITS: Final = {
    "all": "detach the result of {module} before the other network gets it (.detach()), or compute it under torch.no_grad()",
    "weights": "switch the gradients of the parameters of {module} off for this loss: requires_grad_(False) on it before the "
    "forward pass, requires_grad_(True) after the backward",
}
_REASONS: Final = {
    "all": "nothing that this loss trains lies behind it",
    "weights": "the gradient must go through it, its own parameters' need not be computed",
}


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all networks: each part may be small where the sum is not."""
    backward_s = evidence.steps.phases.get("backward", 0.0)
    parts = [_DiscardedPart(f, how, float(share) * backward_s) for f, (how, share) in _facts(evidence)]
    parts.sort(key=lambda p: -p.seconds)
    if not parts:
        return
    cost_s = sum(p.seconds for p in parts)
    yield Finding(
        where=evidence.source_of(parts[0].fact.source),
        cost_s=cost_s,
        saved_s=around(cost_s, 0.15),
        because="; ".join(
            f"{p.fact.value:.0f} times a step the backward computes gradients of {p.fact.module} that are cleared before its "
            f"optimizer steps, {milliseconds(p.seconds)}: {_REASONS[p.how]}"
            for p in parts
        ),
        edit="; ".join(dict.fromkeys(_EDITS[p.how].format(module=p.fact.module.partition(" ")[0]) for p in parts)),
        also=evidence.sources_of(p.fact.source for p in parts[1:]),
        module=parts[0].fact.module,
        basis="timed",
    )


def _facts(evidence: Evidence) -> Iterator[tuple[ModuleFact, list[str]]]:
    return ((f, f.text.split(",")) for f in facts_named(evidence, "discarded-gradient"))


RULE = rule(__name__, check, title="Gradients that are cleared unused")
