"""A recurrent layer over a packed sequence, where the padded batch would be faster.

Costs        On a CPU a packed batch takes the layer off its fused kernel: every time step becomes a handful of small operators,
             forward and backward.
Evidence     torch's packing operator in the step, no fused recurrent kernel. Trial: the captured model with the same layer run on
             the padded batch, each row's last state taken at its own length.
Levers       graph.unpack-recurrence
False alarm  Batches that are nearly all padding, where packing wins; cuDNN, which takes packed batches as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import around, model_seconds, remaining_fraction, result_of

_PACKS: Final = "aten._pack_padded_sequence"
_FUSED: Final = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the line that packs."""
    result = result_of(evidence, _trial(evidence))
    if result is None:
        return
    packing = next(o for o in evidence.operators if o.op == _PACKS)
    remaining = remaining_fraction(result)
    busy_s = model_seconds(evidence)
    yield Finding(
        regime="overhead",
        where=evidence.source_of(packing.source),
        cost_s=busy_s,
        saved_s=around(busy_s * max(0.0, 1 - remaining), 0.15),
        because=f"a batch packed here runs its recurrent layer time step by time step, outside the fused kernel; on the padded "
        f"batch forward and backward take {remaining:.0%} (tried)",
        edit="run the layer on the padded batch, and take each row's state at its own length: out[range(B), lengths - 1]",
        phases=("forward", "backward"),
        basis="trial",
    )


def _trial(evidence: Evidence) -> TimeModel | None:
    """The model with its recurrent layers run on padded batches."""
    names = {o.op for o in evidence.operators if o.phase != "backward"}
    if evidence.steps.device_s is not None or _PACKS not in names or any(f in n for n in names for f in _FUSED):
        return None
    models = range(len(evidence.models))
    largest = max(models, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls, default=None)
    if largest is None:
        return None
    return TimeModel(model=largest, variant="unpacked", backward=evidence.steps.kind != "inference")


RULE = rule(
    __name__,
    check,
    trial=_trial,
    title="A packed sequence keeps the recurrent layer off its fused kernel",
    rewrites_line=True,
)
