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

from flatout.cost.accounting import around, group_by, kept_fraction, milliseconds, result_of, seconds_of
from flatout.cost.parameters import parameter_loops
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeForeach

_WORTH_A_TRIAL = 0.04
_NAMED = 4
_NORMS = ("aten.linalg_vector_norm", "aten.norm")


def propose(evidence: Evidence) -> Iterator[TimeForeach]:
    """Time each loop's operators gathered."""
    for rows in parameter_loops(evidence).values():
        if seconds_of(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield TimeForeach(operators=rows)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function."""
    for rows in parameter_loops(evidence).values():
        result = result_of(evidence, TimeForeach(operators=rows))
        if result is None:
            continue
        cost_s, kept = seconds_of(evidence, rows), kept_fraction(result)
        by_line = group_by(rows, lambda i: evidence.operators[i].source)
        hottest = max(by_line, key=lambda s: seconds_of(evidence, by_line[s]))
        where = evidence.source_of(hottest)
        num = sum(evidence.operators[i].num_calls for i in rows)
        yield Finding(
            rule=RULE.id,
            regime="overhead",
            where=where,
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - kept), 0.2),
            because=f"{num:.0f} operators a step walk over the parameters one tensor at a time, {milliseconds(cost_s)}; "
            "gathered into "
            f"foreach calls they take {kept:.0%} (tried)",
            edit=_edit(evidence, rows),
            also=tuple(s for s in map(evidence.source_of, by_line) if s is not None and s != where),
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


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


RULE = Rule(
    id="overhead.parameter-loop",
    title="A Python loop over the parameters",
    module=__name__,
    check=check,
    propose=propose,
    levers=("parallelism.foreach",),
)
