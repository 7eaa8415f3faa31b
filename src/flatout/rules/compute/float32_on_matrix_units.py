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

from flatout.cost.accounting import (
    facts_named,
    kept_fraction,
    main_model,
    milliseconds,
    model_seconds,
    result_of,
    setting_of,
)
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel
from flatout.records.workload import Source

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "cudnn_convolution")
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
    saved = [max(0.0, busy_s * (1 - kept_fraction(r))) for r in results]
    cost_s = sum(evidence.operators[i].op_s for i in rows)
    tried = ", ".join(
        f"{_WORDS[r.trial.variant]} {kept_fraction(r):.0%}" for r in results if isinstance(r.trial, TimeModel)
    )
    yield Finding(
        rule=RULE.id,
        regime="compute",
        where=_where(evidence),
        cost_s=min(evidence.steps.whole_s, max(cost_s, *saved)),
        saved_s=((1 - _SPREAD) * min(saved), max(saved)),
        because=f"float32 products and convolutions take {milliseconds(cost_s)} of the step without the matrix units; "
        "forward and "
        f"backward take {tried} (tried)",
        edit="torch.set_float32_matmul_precision('high') for TF32; with torch.autocast('cuda', dtype=torch.bfloat16): around the "
        "forward pass and loss for more",
        levers=RULE.levers,
        operators=rows,
        basis="trial",
    )


_WORDS = {"tf32": "with TF32", "bf16-autocast": "under autocast"}


def _rows(evidence: Evidence) -> tuple[int, ...]:
    if evidence.workload.device == "cpu" or facts_named(evidence, "autocast"):
        return ()
    if setting_of(evidence, "float32_matmul_precision") not in ("", "highest"):
        return ()
    return tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.op.removeprefix("aten.") in _PRODUCTS and any(t.dtype == "float32" for t in o.inputs)
    )


def _trials(evidence: Evidence) -> list[TimeModel]:
    model = main_model(evidence)
    if model is None:
        return []
    backward = evidence.models[model].num_graphs_used > 0
    return [
        TimeModel(model=model, variant="tf32", backward=backward),
        TimeModel(model=model, variant="bf16-autocast", backward=backward),
    ]


def _where(evidence: Evidence) -> Source | None:
    """The line that forbade TF32, else the call of the module."""
    for setting in evidence.workload.settings:
        if setting.name == "float32_matmul_precision" and setting.source is not None:
            return setting.source
    model = main_model(evidence)
    return evidence.source_of(evidence.models[model].source) if model is not None else None


RULE = Rule(
    id="compute.float32-on-matrix-units",
    title="Float32 products beside idle matrix units",
    module=__name__,
    check=check,
    propose=propose,
    levers=("workload.tf32", "workload.mixed-precision"),
)
