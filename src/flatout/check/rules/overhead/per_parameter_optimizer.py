"""The optimizer walks over the parameters one by one.

Costs        Some ten operators for each parameter tensor and step, where a fused kernel takes one for all.
Evidence     The optimizer's options and its share of the step. Trial: a step of the optimizer as it is, with foreach=True and
             with fused=True, on copies of its own parameters.
Levers       parallelism.fused-optimizer
False alarm  A few large tensors, where the walk does not matter: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeOptimizer
from flatout.machine.cost.accounting import around, remaining_fraction, result_of

_WORTH_A_TRIAL = 0.04


def propose(evidence: Evidence) -> Iterator[TimeOptimizer]:
    """Time the variants of every optimizer that takes a share of the step and is not fused."""
    for index, use in enumerate(evidence.optimizers):
        if use.variant in ("for-loop", "foreach") and use.step_s > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield TimeOptimizer(optimizer=index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per optimizer."""
    for index, use in enumerate(evidence.optimizers):
        result = result_of(evidence, TimeOptimizer(optimizer=index))
        if result is None:
            continue
        cost_s = min(use.step_s, evidence.steps.phases.get("optimizer", use.step_s))
        remaining = remaining_fraction(result)
        where = use.constructed if use.constructed >= 0 else use.source
        yield Finding(
            where=evidence.source_of(where),
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - remaining), 0.15),
            because=f"{use.name} ({use.variant}) takes {cost_s * 1e3:.2f} ms a step over {use.num_tensors} tensors; "
            f"{result.variant}=True takes {remaining:.0%} of that (tried)",
            edit=f"torch.optim.{use.name}(..., {result.variant}=True)",
            operators=tuple(
                i for i, o in enumerate(evidence.operators) if o.phase == "optimizer" and o.source == use.source
            ),
            basis="trial",
        )


RULE = rule(__name__, check, propose=propose)
