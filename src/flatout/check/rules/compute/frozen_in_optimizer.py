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

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import around, facts_named, group_by, main_model, milliseconds, model_seconds
from flatout.machine.cost.suspects import SuspectRows, proposing, tried

_WORTH_A_TRIAL = 0.03
_NAMED = 3


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all modules with a rate of zero."""
    for modules in tried(evidence, _frozen):
        facts = facts_named(evidence, "zero-rate")
        saved_s = min(modules.cost_s, max(0.0, model_seconds(evidence) * (1 - modules.remaining)))
        yield Finding(
            where=evidence.source_of(facts[0].source),
            cost_s=modules.cost_s,
            saved_s=around(saved_s, 0.15),
            because=f"{sum(f.value for f in facts) / 1e6:.2f} M parameters have a learning rate of zero; the backward of their "
            f"modules takes {milliseconds(modules.cost_s)} a step, and with them frozen forward and backward take "
            f"{modules.remaining:.0%} (tried)",
            edit="requires_grad_(False) on these modules and leave them out of the optimizer, until they are to be trained",
            module=facts[0].module,
            operators=modules.suspect.rows,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield one note per optimizer that holds parameters without gradients."""
    for source, facts in group_by(facts_named(evidence, "no-gradient"), lambda f: f.source).items():
        names = ", ".join(f.module or "a parameter of no module" for f in facts[:_NAMED])
        more = f" and {len(facts) - _NAMED} more" if len(facts) > _NAMED else ""
        yield Note(
            where=evidence.source_of(source),
            text=f"the optimizer holds {sum(f.value for f in facts):.0f} parameters that never got a gradient "
            f"({names}{more}): they are not trained",
        )


def _frozen(evidence: Evidence) -> Iterator[SuspectRows[TimeModel]]:
    """The backward of the modules whose learning rate is zero."""
    modules = tuple(sorted({f.module for f in facts_named(evidence, "zero-rate")}))
    rows = tuple(i for i, o in enumerate(evidence.operators) if o.phase == "backward" and o.module in modules)
    index = main_model(evidence)
    if index is not None and modules:
        yield SuspectRows(rows, TimeModel(model=index, variant="frozen", backward=True, modules=modules))


RULE = rule(
    __name__,
    check,
    propose=proposing(_frozen, worth=_WORTH_A_TRIAL),
    note=note,
    title="Parameters in the optimizer that never change",
)
