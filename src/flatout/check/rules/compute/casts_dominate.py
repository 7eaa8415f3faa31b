"""Tensors are cast to and fro.

Costs        A cast reads and writes the whole tensor, forward and again backward, and computes nothing.
Evidence     Casts that a line spells out and that the data flow undoes before any product has used the new dtype, or that are
             done again for a tensor that was cast already. The price is their own time.
Levers       workload.keep-dtype
False alarm  Casts that autocast makes; one cast of the batch on its way in; a loss that is taken in float32 on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by, milliseconds, operator_seconds
from flatout.machine.cost.lines import function_finder
from flatout.machine.cost.trace import consumers

_SPELT = (".float(", ".half(", ".bfloat16(", ".double(", ".to(", ".type(", ".type_as(", "dtype=")
_USES = ("mm", "bmm", "addmm", "baddbmm", "convolution", "attention", "embedding")
_PARTS = tuple(f"aten.{name}" for name in ["slice", "split", "select", "unbind", "chunk", "split_with_sizes", "narrow"])
_FARTHEST = 12


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function that casts to and fro."""
    wasted = _wasted(evidence)
    sources = {evidence.operators[evidence.trace.operator[c]].source for c in wasted}
    rows = [i for i, o in enumerate(evidence.operators) if o.source in sources and _is_cast(o)]
    function_of = function_finder(evidence)
    for mine in group_by(rows, lambda i: function_of(evidence.operators[i].source)).values():
        cost_s = operator_seconds(evidence, mine)
        by_line = group_by(mine, lambda i: evidence.operators[i].source)
        hottest = max(by_line, key=lambda s: operator_seconds(evidence, by_line[s]))
        num = sum(evidence.operators[i].num_calls for i in mine)
        yield Finding(
            regime="bandwidth",
            where=evidence.source_of(hottest),
            cost_s=cost_s,
            saved_s=(0.5 * cost_s, cost_s),
            because=f"{num:.0f} casts a step, forward and backward, change the dtype of tensors and back, or cast the same "
            f"tensor again; they take {milliseconds(cost_s)}",
            edit="choose one dtype for this part and cast once where it begins",
            also=evidence.sources_of(by_line),
            module=evidence.operators[mine[0]].module,
            operators=tuple(mine),
        )


def _wasted(evidence: Evidence) -> set[int]:
    """Calls of the trace that cast in vain, with the casts that undo them."""
    trace, operators = evidence.trace, evidence.operators
    readers = consumers(trace)
    casts = [c for c, row in enumerate(trace.operator) if _is_cast(operators[row]) and _is_spelt(evidence, row)]
    found: set[int] = set()
    for cast in casts:
        back = _undone_by(evidence, readers, cast)
        if back is not None:
            found |= {cast, back}
    again = group_by(
        (c for c in casts if trace.producers[c] and trace.producers[c][0] >= 0),
        lambda c: (trace.producers[c][0], operators[trace.operator[c]].inputs, operators[trace.operator[c]].outputs),
    )
    for (producer, _, _), calls in again.items():
        is_whole = not any(operators[trace.operator[r]].op in _PARTS for r in readers.get(producer, ()))
        found |= set(calls[1:]) if is_whole else set()
    return found


def _undone_by(evidence: Evidence, readers: dict[int, list[int]], cast: int) -> int | None:
    """The later cast to the old dtype that is reached through cheap operators alone; None when a product comes first."""
    trace, operators = evidence.trace, evidence.operators
    old = operators[trace.operator[cast]].inputs[0].dtype
    new = operators[trace.operator[cast]].outputs[0].dtype
    call = cast
    for _ in range(_FARTHEST):
        following = [r for r in readers.get(call, ()) if operators[trace.operator[r]].phase != "backward"]
        if len(following) != 1:
            return None
        call = following[0]
        operator = operators[trace.operator[call]]
        if _is_cast(operator) and operator.inputs[0].dtype == new and operator.outputs[0].dtype == old:
            return call if _is_spelt(evidence, trace.operator[call]) else None
        if any(use in operator.op for use in _USES):
            return None
    return None


def _is_cast(operator: Operator) -> bool:
    """Whether it changes one floating dtype for another on more than a handful of numbers."""
    if operator.op != "aten._to_copy" or not operator.inputs or not operator.outputs or operator.source < 0:
        return False
    old, new = operator.inputs[0], operator.outputs[0]
    return old.dtype != new.dtype and "float" in old.dtype and "float" in new.dtype and old.num_elements > 1


def _is_spelt(evidence: Evidence, row: int) -> bool:
    source = evidence.source_of(evidence.operators[row].source)
    return source is not None and any(word in source.text for word in _SPELT)


RULE = rule(__name__, check, title="Tensors cast to and fro", rewrites_line=True)
