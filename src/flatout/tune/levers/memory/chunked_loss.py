"""The logits over a large vocabulary and their cross entropy are computed some tokens at a time.

What        `logits = self.head(x)` and `F.cross_entropy(logits.view(-1, V), targets.view(-1))` become
            `linear_cross_entropy(x, self.head.weight, targets)`.
Guarantee   BOUNDED: sums in another order, float32 throughout.
Refuses     Logits that are used besides (returned, for example); heads that are not nn.Linear as the class shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.tune.rewrite.flow import Flow
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.linear_losses import BLOCK, fused_call, linear_loss
from flatout.tune.rewrite.source import local_proposals


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where all logits were in memory at the peak; the time stays the same."""
    why = "no logits over a large vocabulary fill memory"
    for proposal in local_proposals(evidence, findings, edit, else_because=why):
        saved_bytes = max(f.saved_bytes for f in findings if proposal.where in (f.where, *f.also))
        yield msgspec.structs.replace(proposal, saved_bytes=saved_bytes)


def edit(text: str, parameters: Parameters) -> str:
    """Put the chunked loss in place of the linear layer and the loss.

    Raises EditError when the head or the loss is not recognised, or the logits are used besides.
    """
    flow = Flow(text, parameters)
    found = linear_loss(flow)
    new, reused = fused_call(flow, found)
    module = flow.replaced(found.last, new, removed=set(found.removed), reused=reused)
    return with_import(module, "flatout", BLOCK).code


LEVER = lever(__name__, propose, edit=edit, is_local=True, title="Loss in chunks of tokens")
