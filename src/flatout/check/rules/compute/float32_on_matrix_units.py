"""Products in full float32 on a GPU whose matrix units stand idle.

Costs        A float32 product without TF32 runs on the ordinary units, at an eighth or less of the matrix units' rate (51
             against 400 TFLOP/s on an H200).
Evidence     Device time of float32 products and convolutions while TF32 is off and no autocast is on. Trials: the module with
             TF32 allowed, and under autocast to bfloat16.
Levers       workload.tf32, workload.mixed-precision
False alarm  Work that needs float32's 24 bits (solvers, physics); a step that waits for its host: the trials show no gain there.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import (
    facts_named,
    milliseconds,
    model_seconds,
    model_trial,
    remaining_fraction,
    result_of,
    setting_line,
    setting_of,
)
from flatout.machine.cost.matrix_units import float32_products

_WORTH_A_TRIAL = 0.1
_SPREAD = 0.15


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module with TF32, and under autocast."""
    rows = _rows(evidence)
    if sum(evidence.operators[i].op_s for i in rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
        yield from _trials(evidence)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all float32 products, with what each of both cures gains."""
    rows = _rows(evidence)
    results = [r for t in _trials(evidence) if (r := result_of(evidence, t)) is not None]
    if not rows or not results:
        return
    busy_s = model_seconds(evidence)
    saved = [max(0.0, busy_s * (1 - remaining_fraction(r))) for r in results]
    cost_s = sum(evidence.operators[i].op_s for i in rows)
    tried = ", ".join(
        f"{_WORDS[r.trial.variant]} {remaining_fraction(r):.0%}" for r in results if isinstance(r.trial, TimeModel)
    )
    yield Finding(
        where=setting_line(evidence, "float32_matmul_precision"),
        cost_s=min(evidence.steps.whole_s, max(cost_s, *saved)),
        saved_s=((1 - _SPREAD) * min(saved), max(saved)),
        because=f"float32 products and convolutions take {milliseconds(cost_s)} of the step without the matrix units; "
        f"forward and backward take {tried} (tried)",
        edit="torch.set_float32_matmul_precision('high') for TF32; with torch.autocast('cuda', dtype=torch.bfloat16): around the "
        "forward pass and loss for more",
        operators=rows,
        basis="trial",
    )


_WORDS = {"tf32": "with TF32", "bf16-autocast": "under autocast"}


def _rows(evidence: Evidence) -> tuple[int, ...]:
    if evidence.workload.device == "cpu" or facts_named(evidence, "autocast"):
        return ()
    is_full = setting_of(evidence, "float32_matmul_precision") in ("", "highest")
    return float32_products(evidence) if is_full else ()


def _trials(evidence: Evidence) -> list[TimeModel]:
    trials = (model_trial(evidence, "tf32"), model_trial(evidence, "bf16-autocast"))
    return [t for t in trials if t is not None]


RULE = rule(__name__, check, propose=propose, title="Float32 products beside idle matrix units")
