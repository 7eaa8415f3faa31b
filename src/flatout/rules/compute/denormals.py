"""Numbers too small to be normal slow the CPU down.

Costs        Arithmetic with subnormal numbers (below 1.2e-38 in float32) is done in microcode, up to a hundred times slower.
Evidence     The share of subnormal numbers among the sampled results of operators. Trial: the module on its captured inputs with
             torch.set_flush_denormal(True).
Levers       workload.flush-denormal
False alarm  A processor that handles them at full speed, or a handful of them: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import (
    around,
    facts_named,
    kept_fraction,
    main_model,
    model_seconds,
    result_of,
    rows_at,
    seconds_of,
    setting_of,
)
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel
from flatout.records.usage import ModuleFact

_SUSPICIOUS = 0.005


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module with subnormal numbers flushed to zero."""
    trial = _trial_of(evidence)
    if _facts(evidence) and trial is not None:
        yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding, at the line whose operators hold them and take longest."""
    facts, trial = _facts(evidence), _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None and facts else None
    if result is None:
        return
    worst = max(facts, key=lambda f: seconds_of(evidence, rows_at(evidence, (f.source,))))
    kept = kept_fraction(result)
    cost_s = max(0.0, model_seconds(evidence) * (1 - kept))
    yield Finding(
        rule=RULE.id,
        regime="compute",
        where=evidence.source_of(worst.source),
        cost_s=cost_s,
        saved_s=around(cost_s, 0.15),
        because=f"{worst.value:.1%} of the results of {worst.kind.removeprefix('aten.')} are subnormal numbers; flushed to zero, "
        f"forward and backward take {kept:.0%} (tried)",
        edit="torch.set_flush_denormal(True) once at the start",
        module=worst.module,
        levers=RULE.levers,
        basis="trial",
    )


def _facts(evidence: Evidence) -> list[ModuleFact]:
    if evidence.workload.device != "cpu" or setting_of(evidence, "flush_denormal") == "True":
        return []
    return [f for f in facts_named(evidence, "subnormal") if f.value >= _SUSPICIOUS and f.source >= 0]


def _trial_of(evidence: Evidence) -> TimeModel | None:
    model = main_model(evidence)
    if model is None:
        return None
    return TimeModel(model=model, variant="flush-denormal", backward=evidence.models[model].num_graphs_used > 0)


RULE = Rule(
    id="compute.denormals",
    title="Numbers too small to be normal",
    module=__name__,
    check=check,
    propose=propose,
    levers=("workload.flush-denormal",),
)
