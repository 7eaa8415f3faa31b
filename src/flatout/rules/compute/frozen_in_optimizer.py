"""The optimizer holds parameters that never change.

Costs        Where the learning rate of a group is zero: the backward that computes its gradients. Where no gradient ever comes:
             a place in every walk over the parameters, and the hope that they are being trained.
Evidence     Parameters with a gradient whose rate was zero in every step looked at, priced by a trial of forward and backward
             with their modules frozen; parameters without a gradient in every step looked at (a note).
Levers       workload.freeze
False alarm  A warm-up that starts at zero: the rate is read again at the end. Experts or heads that are used now and then.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import (
    around,
    facts_named,
    group_by,
    kept_fraction,
    main_model,
    milliseconds,
    model_seconds,
    result_of,
    seconds_of,
)
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule
from flatout.records.trial import TimeModel

_WORTH_A_TRIAL = 0.03
_NAMED = 3


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Freeze the modules whose learning rate is zero."""
    if seconds_of(evidence, _rows(evidence)) > _WORTH_A_TRIAL * evidence.steps.step_s:
        trial = _trial_of(evidence)
        if trial is not None:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all modules with a rate of zero."""
    trial = _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None else None
    if result is None:
        return
    facts = facts_named(evidence, "zero-rate")
    rows = _rows(evidence)
    cost_s = seconds_of(evidence, rows)
    saved_s = min(cost_s, max(0.0, model_seconds(evidence) * (1 - kept_fraction(result))))
    yield Finding(
        rule=RULE.id,
        regime="compute",
        where=evidence.source_of(facts[0].source),
        cost_s=cost_s,
        saved_s=around(saved_s, 0.15),
        because=f"{sum(f.value for f in facts) / 1e6:.2f} M parameters have a learning rate of zero; the backward of "
        "their modules "
        f"takes {milliseconds(cost_s)} a step, and with them frozen forward and backward take "
        f"{kept_fraction(result):.0%} (tried)",
        edit="requires_grad_(False) on these modules and leave them out of the optimizer, until they are to be trained",
        module=facts[0].module,
        levers=RULE.levers,
        operators=rows,
        basis="trial",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield one note per optimizer that holds parameters without gradients."""
    for source, facts in group_by(facts_named(evidence, "no-gradient"), lambda f: f.source).items():
        names = ", ".join(f.module or "a parameter of no module" for f in facts[:_NAMED])
        more = f" and {len(facts) - _NAMED} more" if len(facts) > _NAMED else ""
        yield Note(
            rule=RULE.id,
            where=evidence.source_of(source),
            text=f"the optimizer holds {sum(f.value for f in facts):.0f} parameters that never got a gradient "
            f"({names}{more}): they "
            "are not trained",
        )


def _rows(evidence: Evidence) -> tuple[int, ...]:
    modules = {f.module for f in facts_named(evidence, "zero-rate")}
    return tuple(i for i, o in enumerate(evidence.operators) if o.phase == "backward" and o.module in modules)


def _trial_of(evidence: Evidence) -> TimeModel | None:
    model = main_model(evidence)
    modules = tuple(sorted({f.module for f in facts_named(evidence, "zero-rate")}))
    if model is None or not modules:
        return None
    return TimeModel(model=model, variant="frozen", backward=True, modules=modules)


RULE = Rule(
    id="compute.frozen-in-optimizer",
    title="Parameters in the optimizer that never change",
    module=__name__,
    check=check,
    propose=propose,
    note=note,
    levers=("workload.freeze",),
)
