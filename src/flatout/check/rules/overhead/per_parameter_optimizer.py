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
from flatout.core.records.trial import TimeOptimizer, TrialResult
from flatout.machine.cost.accounting import group_by, remaining_fraction, result_of

_WORTH_A_TRIAL = 0.04
_SPREAD = 0.15


def propose(evidence: Evidence) -> Iterator[TimeOptimizer]:
    """Time the variants of every optimizer that takes a share of the step and is not fused."""
    for index, use in enumerate(evidence.optimizers):
        if use.variant in ("for-loop", "foreach") and use.calls * use.step_s > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield TimeOptimizer(optimizer=index)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all optimizers of one class that the same variant makes faster: one edit, made for each."""
    uses = evidence.optimizers
    results = [(i, r) for i in range(len(uses)) if (r := result_of(evidence, TimeOptimizer(optimizer=i))) is not None]
    faster = [(i, r) for i, r in results if remaining_fraction(r) < 1]
    for tried in group_by(faster, lambda row: (uses[row[0]].name, row[1].variant)).values():
        yield _finding(evidence, tried)


def _finding(evidence: Evidence, tried: list[tuple[int, TrialResult]]) -> Finding:
    seconds = {i: evidence.optimizers[i].calls * evidence.optimizers[i].step_s for i, _ in tried}
    # The trial's step may be slower or faster than the script's own: what it leaves as a share, and in seconds.
    by_share_s = sum(seconds[i] * max(0.0, 1 - remaining_fraction(result)) for i, result in tried)
    by_time_s = sum(max(0.0, seconds[i] - evidence.optimizers[i].calls * (r.cured_s or 0.0)) for i, r in tried)
    total_s = sum(seconds.values())
    low_s, high_s = sorted((by_share_s, by_time_s))
    saved_s = (low_s + high_s) / 2
    # The optimizers' phase is timed in undisturbed steps, their calls also in steps that were looked at closely.
    scale = min(1.0, evidence.steps.phases.get("optimizer", total_s) / total_s) if total_s else 0.0
    order = [evidence.optimizers[i] for i in sorted(seconds, key=lambda i: -seconds[i])]
    use, variant = order[0], tried[0][1].variant
    lines = [u.constructed if u.constructed >= 0 else u.source for u in order]
    num_tensors = sum(u.num_tensors for u in order)
    several = f" and {len(order) - 1} more like it" if len(order) > 1 else ""
    return Finding(
        where=evidence.source_of(lines[0]),
        cost_s=scale * total_s,
        saved_s=(scale * (1 - _SPREAD) * low_s, scale * min((1 + _SPREAD) * high_s, total_s)),
        because=f"{use.name}{several} ({use.variant}) takes {scale * total_s * 1e3:.2f} ms a step over {num_tensors} tensors; "
        f"{variant}=True takes {1 - saved_s / total_s if total_s else 1.0:.0%} of that (tried)",
        edit=f"torch.optim.{use.name}(..., {variant}=True)",
        also=evidence.sources_of(dict.fromkeys(lines[1:])),
        operators=tuple(
            i
            for i, o in enumerate(evidence.operators)
            if o.phase == "optimizer" and o.source in {u.source for u in order}
        ),
        basis="trial",
    )


RULE = rule(__name__, check, propose=propose)
