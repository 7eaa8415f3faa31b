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
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Parameters
from flatout.tune.rewrite.flow import Flow
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.linear_losses import BLOCK, fused_call, linear_loss
from flatout.tune.rewrite.source import local_proposals


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where all logits were in memory at the peak. On a device it may save time, too; on a CPU that stays the same."""
    why = "no logits over a large vocabulary fill memory"
    for proposal in local_proposals(evidence, findings, edit, else_because=why):
        saved_bytes = max(f.saved_bytes for f in findings if proposal.where in (f.where, *f.also))
        saved_s = (0.0, _most_saved_s(evidence, findings)) if evidence.workload.device != "cpu" else proposal.saved_s
        yield msgspec.structs.replace(proposal, saved_bytes=saved_bytes, saved_s=saved_s)


def _most_saved_s(evidence: Evidence, findings: Sequence[Finding]) -> float:
    """Seconds of the loss's passes over all logits, without one that reads them and writes their gradients: the kernel's."""
    most_s = 0.0
    for finding in findings:
        sources = {i for i, source in enumerate(evidence.sources) if source == finding.where}
        losses = [o for o in evidence.operators if o.op == "aten._log_softmax" and o.outputs and o.source in sources]
        if not losses:
            continue
        loss = max(losses, key=lambda o: o.outputs[0].num_elements)
        passes = [o for o in evidence.operators if o.source in sources and _goes_over(o, loss.outputs[0].num_elements)]
        num_bytes = sum(o.num_calls * o.bytes for o in passes)
        if num_bytes:
            most_s = max(most_s, sum(o.op_s for o in passes) * (1 - loss.num_calls * loss.bytes / num_bytes))
    return most_s


def _goes_over(operator: Operator, num: int) -> bool:
    """Whether it reads or writes so many numbers, and is no product."""
    is_product = operator.flop > 4 * max((t.num_elements for t in operator.outputs), default=0)
    return not is_product and any(t.num_elements == num for t in (*operator.inputs, *operator.outputs))


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
