"""A Python loop walks over the model's parameters.

Costs        One or more tiny operators for each parameter tensor, where torch's foreach functions take one call for all.
Evidence     Lines outside forward and backward whose operators run once for most tensors that the optimizer holds: gradient
             clipping, an average of the weights, weight decay, an update by hand. Trial: the same operators at the same shapes,
             one by one and gathered into torch._foreach_* calls.
Levers       parallelism.foreach
False alarm  A few large tensors, where the walk does not matter: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeForeach
from flatout.machine.cost.accounting import around, group_by, milliseconds, operator_seconds
from flatout.machine.cost.parameters import parameter_loops
from flatout.machine.cost.suspects import SuspectRows, proposing, tried

_WORTH_A_TRIAL = 0.04
_NAMED = 4
_NORMS = ("aten.linalg_vector_norm", "aten.norm")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function."""
    for loop in tried(evidence, _loops):
        rows, cost_s = loop.suspect.rows, loop.cost_s
        by_line = group_by(rows, lambda i: evidence.operators[i].source)
        num = sum(evidence.operators[i].num_calls for i in rows)
        yield Finding(
            where=evidence.source_of(max(by_line, key=lambda s: operator_seconds(evidence, by_line[s]))),
            cost_s=cost_s,
            saved_s=around(loop.saved_s, 0.2),
            because=f"{num:.0f} operators a step walk over the parameters one tensor at a time, {milliseconds(cost_s)}; "
            f"gathered into foreach calls they take {loop.remaining:.0%} (tried)",
            edit=_edit(evidence, rows),
            also=evidence.sources_of(by_line),
            operators=rows,
            basis="trial",
        )


def _loops(evidence: Evidence) -> Iterator[SuspectRows[TimeForeach]]:
    """Each loop with its operators gathered."""
    for rows in parameter_loops(evidence).values():
        yield SuspectRows(rows, TimeForeach(operators=rows))


def _edit(evidence: Evidence, rows: tuple[int, ...]) -> str:
    ops = {evidence.operators[i].op for i in rows}
    if ops & set(_NORMS):
        return (
            "torch.nn.utils.clip_grad_norm_(parameters, limit, foreach=True), or torch._foreach_norm over all gradients"
        )
    if ops == {"aten.lerp_"} or ops == {"aten.mul_", "aten.add_"}:
        return (
            "torch._foreach_lerp_(averages, parameters, 1 - decay), or torch.optim.swa_utils.AveragedModel with "
            "multi_avg_fn=get_ema_multi_avg_fn(decay)"
        )
    names = sorted(f"torch._foreach_{op.removeprefix('aten.')}" for op in ops)
    return f"gather the tensors in lists once and call {', '.join(names[:_NAMED])} on the lists"


RULE = rule(
    __name__,
    check,
    propose=proposing(_loops, worth=_WORTH_A_TRIAL),
    title="A Python loop over the parameters",
    rewrites_line=True,
)
