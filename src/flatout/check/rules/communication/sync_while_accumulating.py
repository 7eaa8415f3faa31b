"""Gradients are synchronised in every micro-batch, though the optimizer steps once for several.

Costs        All synchronisations but the last: their exposed time.
Evidence     Backward passes with a gradient synchronisation for each optimizer step, and how long one keeps the backward waiting.
Levers       communication.no-sync
False alarm  Accumulation under `no_sync()`; a model that is updated by several optimizers in a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding per replicated module that synchronises more than once a step."""
    distributed = evidence.distributed
    if distributed is None or evidence.steps.kind != "training" or len(evidence.optimizers) > 1:
        return
    for module in distributed.replications:
        syncs = round(module.syncs_per_step)
        if syncs < 2 or module.exposed_per_sync_s is None:
            continue
        exposed_s = module.exposed_per_sync_s
        rows = [c for c in distributed.collectives if c.op == "ddp.gradients" and c.source == module.backward_source]
        waited_s = sum(c.wait_s for c in rows) / syncs
        # What a rank waited for slower ranks it would wait for at the one synchronisation that is left, in part.
        low_s = max(0.0, exposed_s - waited_s)
        cost_s = min(exposed_s * syncs, evidence.steps.step_s)
        yield Finding(
            where=evidence.source_of(module.backward_source),
            cost_s=cost_s,
            saved_s=(min(low_s * (syncs - 1), cost_s), min(exposed_s * (syncs - 1), cost_s)),
            because=f"{syncs} backward passes a step each synchronise {sum(module.bucket_bytes) / 1e6:.1f} MB of gradients and "
            f"wait {exposed_s * 1e3:.2f} ms for it; the optimizer reads them once",
            edit="run all micro-batches but the last of a step under `with model.no_sync():` (forward and backward)",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where the time of the synchronisations is not known, or several optimizers step."""
    distributed = evidence.distributed
    for module in distributed.replications if distributed is not None else ():
        syncs = round(module.syncs_per_step)
        if syncs >= 2 and (module.exposed_per_sync_s is None or len(evidence.optimizers) > 1):
            yield Note(
                where=evidence.source_of(module.backward_source),
                text=f"{syncs} synchronisations of the gradients a step; if they are accumulated, `no_sync()` saves all but "
                "the last",
            )


RULE = rule(__name__, check, note=note, title="Gradients are synchronised in every micro-batch")
