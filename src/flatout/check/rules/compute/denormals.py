"""Numbers too small to be normal slow the CPU down.

Costs        Arithmetic with subnormal numbers (below 1.2e-38 in float32) is done in microcode, up to a hundred times slower.
Evidence     The share of subnormal numbers among the sampled results of operators. Trial: the module on its captured inputs with
             torch.set_flush_denormal(True).
Levers       workload.flush-denormal
False alarm  A processor that handles them at full speed, or a handful of them: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.core.records.usage import ModuleFact
from flatout.machine.cost.accounting import (
    around,
    facts_named,
    model_seconds,
    model_trial,
    operator_seconds,
    remaining_fraction,
    result_of,
    rows_at,
    setting_of,
)

_SUSPICIOUS = 0.005


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding, at the line whose operators hold them and take longest."""
    facts, result = _facts(evidence), result_of(evidence, _trial(evidence))
    if result is None:
        return
    if 1 - remaining_fraction(result) <= result.spread_fraction:
        return  # arithmetic in microcode takes times as long, not some per cent
    worst = max(facts, key=lambda f: operator_seconds(evidence, rows_at(evidence, (f.source,))))
    remaining = remaining_fraction(result)
    cost_s = max(0.0, model_seconds(evidence) * (1 - remaining))
    yield Finding(
        where=evidence.source_of(worst.source),
        cost_s=cost_s,
        saved_s=around(cost_s, 0.15),
        because=f"{worst.value:.1%} of the results of {worst.kind.removeprefix('aten.')} are subnormal numbers; flushed to zero, "
        f"forward and backward take {remaining:.0%} (tried)",
        edit="torch.set_flush_denormal(True) once at the start",
        module=worst.module,
        basis="trial",
    )


def _facts(evidence: Evidence) -> list[ModuleFact]:
    if evidence.workload.device != "cpu" or setting_of(evidence, "flush_denormal") == "True":
        return []
    return [f for f in facts_named(evidence, "subnormal") if f.value >= _SUSPICIOUS and f.source >= 0]


def _trial(evidence: Evidence) -> TimeModel | None:
    """The module with subnormal numbers flushed to zero."""
    return model_trial(evidence, "flush-denormal") if _facts(evidence) else None


RULE = rule(__name__, check, trial=_trial, title="Numbers too small to be normal")
