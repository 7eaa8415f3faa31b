"""A model in float32 is run under autocast over and over, with weights that do not change.

Costs        Autocast casts each weight anew whenever it is entered: every call reads all weights in float32 and writes them in
             half the bits, where a model converted once only reads the half. Inference on small batches is bound by just that.
Evidence     An inference loop with casts to bfloat16 or float16 of what was there before the step, as large together as a good
             part of the model. The price is the casts' time.
Levers       workload.cast-once
False alarm  Training, where the weights change; layers that need float32: autocast leaves those alone, a converted model does
             not, so keep them by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import main_model, milliseconds, operator_seconds

_HALF: Final = ("bfloat16", "float16")
_GOOD_PART: Final = 0.25
"""Of the model's parameters: embeddings and norms are not cast."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the model."""
    index = main_model(evidence)
    if index is None or evidence.steps.kind != "inference":
        return
    model = evidence.models[index]
    casts = [i for i, o in enumerate(evidence.operators) if o.phase == "forward" and _is_cast(o)]
    from_results = {
        row
        for row, producers in zip(evidence.trace.operator, evidence.trace.producers, strict=True)
        if any(p >= 0 for p in producers)  # an earlier call of the step wrote what is read here
    }
    weights = tuple(i for i in casts if i not in from_results)
    elements = sum(evidence.operators[i].inputs[0].num_elements * evidence.operators[i].num_calls for i in weights)
    if elements < _GOOD_PART * model.num_parameters * max(1.0, model.calls):
        return
    cost_s = operator_seconds(evidence, weights)
    dtype = evidence.operators[weights[0]].outputs[0].dtype
    yield Finding(
        regime="bandwidth",
        where=evidence.source_of(model.source),
        cost_s=cost_s,
        saved_s=(0.9 * cost_s, cost_s + operator_seconds(evidence, (i for i in casts if i in from_results))),
        because=f"each call casts {elements / max(1.0, model.calls) / 1e6:.3g} M numbers of the model from float32 to {dtype} "
        f"again, {milliseconds(cost_s)}; the weights do not change",
        edit=f"convert the model once, before the loop: model.to(torch.{dtype}), inputs too, and no autocast",
        module=model.name,
        operators=tuple(casts),
        basis="timed",
    )


def _is_cast(operator: Operator) -> bool:
    if operator.op != "aten._to_copy" or not operator.inputs or not operator.outputs or not operator.module:
        return False
    return operator.inputs[0].dtype == "float32" and operator.outputs[0].dtype in _HALF


RULE = rule(__name__, check, title="Weights that do not change are cast in every call")
