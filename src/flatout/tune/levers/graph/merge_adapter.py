"""A layer and its low-rank adapter are multiplied as one: the adapter is added to the weight, not to the result.

What        `self.linear(x) + self.scale * self.up(self.down(x))` becomes
            `lora_linear(x, self.linear, self.down, self.up, scale=self.scale)`; modules and state dict stay.
Guarantee   BOUNDED: the same sums in another order; in 16 bits the adapter is rounded with the weight that it is added to.
Refuses     Adapters with a bias, or with dropout or anything else between their products; layers that are not nn.Linear, or that
            have hooks, when they are called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.tune.rewrite.adapters import BLOCK, adapter_sum
from flatout.tune.rewrite.flow import Flow
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.source import local_proposals


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for each line that adds an adapter's result to its layer's."""
    yield from local_proposals(evidence, findings, edit, else_because="no adapter's result is added to a layer's")


def edit(text: str, parameters: Parameters) -> str:
    """Put one call in place of the sum.

    Raises EditError where no layer with its adapter is recognised, or the adapter has a bias.
    """
    flow = Flow(text, parameters)
    found = adapter_sum(flow)
    module = flow.replaced(found.last, found.call, removed=set(found.removed), reused=[found.x])
    return with_import(module, "flatout", BLOCK).code


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="Low-rank adapter added to the weight")
