"""Batch norm over so few values that its statistics say nothing.

Costs        Quality, not time: the mean and variance of fewer than four values a channel are mostly noise, and so is the running
             average that evaluation uses.
Evidence     Batch norm in training mode, and the shape of what it normalises.
Levers       workload.batch-free-norm
False alarm  A last batch that is smaller than the others: only shapes that come in every step are told.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Note
from flatout.machine.cost.accounting import group_by

_FEWEST = 4
_MOST_STEPS = 0.9


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield one note per line."""
    tiny = [o for o in evidence.operators if _is_tiny(o)]
    for source, operators in group_by(tiny, lambda o: o.source).items():
        if sum(o.num_calls for o in operators) < _MOST_STEPS:
            continue
        smallest = min(operators, key=_num_values)
        shape = "x".join(map(str, smallest.inputs[0].shape))
        yield Note(
            where=evidence.source_of(source),
            text=f"batch norm takes its statistics from {_num_values(smallest):.0f} value(s) a channel ({shape}); use a "
            "group or layer norm, or a larger batch",
        )


def _is_tiny(operator: Operator) -> bool:
    if (
        "batch_norm" not in operator.op
        or operator.phase in ("backward", "evaluation", "no_grad", "rollout")
        or not operator.inputs
    ):
        return False
    is_training = operator.scalars.startswith("True") or "with_update" in operator.op
    return is_training and len(operator.inputs[0].shape) >= 2 and 0 < _num_values(operator) < _FEWEST


def _num_values(operator: Operator) -> float:
    tensor = operator.inputs[0]
    return tensor.num_elements / max(1, tensor.shape[1])


RULE = rule(__name__, note=note, title="Batch norm over too few values")
