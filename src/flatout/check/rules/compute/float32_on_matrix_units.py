"""Products in full float32 on a GPU whose matrix units stand idle.

Costs        A float32 product without TF32 runs on the ordinary units, at an eighth or less of the matrix units' rate (51
             against 400 TFLOP/s on an H200).
Evidence     Device time of float32 products that may not use TF32, while no autocast is on. Trial: the module with TF32 allowed.
             (Convolutions use it unless that is forbidden. What bfloat16 gains is told by compute.mixed-precision.)
Levers       workload.tf32
False alarm  Work that needs float32's 24 bits (solvers, physics); a step that waits for its host: the trial shows no gain there.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import (
    around,
    milliseconds,
    model_seconds,
    model_trial,
    remaining_fraction,
    result_of,
    setting_line,
)
from flatout.machine.cost.matrix_units import float32_products, is_autocast, runs_in_tf32

_WORTH_A_TRIAL = 0.1
_SPREAD = 0.15


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module with TF32."""
    rows, trial = _rows(evidence), model_trial(evidence, "tf32")
    if trial is not None and sum(evidence.operators[i].op_s for i in rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
        yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all these products."""
    rows, result = _rows(evidence), result_of(evidence, model_trial(evidence, "tf32"))
    if not rows or result is None:
        return
    saved_s = around(max(0.0, model_seconds(evidence) * (1 - remaining_fraction(result))), _SPREAD)
    cost_s = sum(evidence.operators[i].op_s for i in rows)
    yield Finding(
        where=setting_line(evidence, "float32_matmul_precision"),
        cost_s=min(evidence.steps.whole_s, max(cost_s, saved_s[1])),
        saved_s=saved_s,
        because=f"float32 products take {milliseconds(cost_s)} of the step without the matrix units; with TF32 forward and "
        f"backward take {remaining_fraction(result):.0%} (tried)",
        edit="torch.set_float32_matmul_precision('high') once, at the start",
        operators=rows,
        basis="trial",
    )


def _rows(evidence: Evidence) -> tuple[int, ...]:
    if evidence.workload.device == "cpu" or is_autocast(evidence):
        return ()
    return tuple(i for i in float32_products(evidence) if not runs_in_tf32(evidence, evidence.operators[i]))


RULE = rule(__name__, check, propose=propose, title="Float32 products beside idle matrix units")
