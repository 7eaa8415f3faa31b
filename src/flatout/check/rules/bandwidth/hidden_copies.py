"""A tensor is copied into another layout although its reader could take it as it is.

Costs        A read and a write of the whole tensor, with one side strided.
Evidence     A copy that changes strides (`.contiguous()`, `.clone()`) and goes straight into an operator. Trial: that operator on
             what was copied, against the copy and the operator.
Levers       memory.keep-layout
False alarm  A copy that a view needs (transpose, then reshape) is left alone, and so is one that makes its reader faster than it
             costs: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeStrides
from flatout.machine.cost.accounting import (
    around,
    group_by,
    milliseconds,
    operator_seconds,
    remaining_fraction,
    result_of,
)
from flatout.machine.cost.trace import consumers

_VIEWS = (
    "view _unsafe_view reshape t transpose permute expand slice select unsqueeze squeeze split as_strided unbind alias"
)
_VIEW_OPS = frozenset(f"aten.{name}" for name in _VIEWS.split())
_FEWEST_ELEMENTS = 4096
_WORTH_A_TRIAL = 0.03


def propose(evidence: Evidence) -> Iterator[TimeStrides]:
    """Time the reader of each copy that matters without it."""
    for copy, trial in _copies(evidence).items():
        if evidence.operators[copy].total_s > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    by_line = group_by(_copies(evidence).items(), lambda item: evidence.operators[item[0]].source)
    for source, items in by_line.items():
        priced = [(copy, trial, r) for copy, trial in items if (r := result_of(evidence, trial)) is not None]
        if not priced:
            continue
        rows = tuple(sorted({copy for copy, _, _ in priced}))
        saved_s = 0.0
        for copy, trial, result in priced:
            copy_s = evidence.operators[copy].total_s
            both_s = copy_s + evidence.operators[trial.reader].op_s
            saved_s += min(copy_s, max(0.0, both_s * (1 - remaining_fraction(result))))
        cost_s = operator_seconds(evidence, rows)
        reader = evidence.operators[priced[0][1].reader].op.removeprefix("aten.")
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=around(saved_s, 0.15),
            because=f"a strided tensor is copied into a contiguous one, {milliseconds(cost_s)} a step, and only {reader} "
            f"reads it; on the original {reader} takes {remaining_fraction(priced[0][2]):.0%} of both (tried)",
            edit="leave the .contiguous() or .clone() out",
            module=evidence.operators[rows[0]].module,
            operators=rows,
            basis="trial",
        )


def _copies(evidence: Evidence) -> dict[int, TimeStrides]:
    """Row of a copy that no view needs -> the trial of its reader."""
    trace, operators = evidence.trace, evidence.operators
    if not any(_is_relayout(o) for o in operators):
        return {}
    readers = consumers(trace)
    found: dict[int, TimeStrides] = {}
    needed: set[int] = set()
    for call, row in enumerate(trace.operator):
        if not _is_relayout(operators[row]):
            continue
        reading = readers.get(call, [])
        forward = [r for r in reading if operators[trace.operator[r]].phase != "backward"]
        if not forward or any(operators[trace.operator[r]].op in _VIEW_OPS for r in reading):
            needed.add(row)
            continue
        reader = forward[0]
        place = trace.producers[reader].index(call)
        found[row] = TimeStrides(copy=row, reader=trace.operator[reader], argument=place)
    return {row: trial for row, trial in found.items() if row not in needed}


def _is_relayout(operator: Operator) -> bool:
    if operator.op != "aten.clone" or operator.phase == "backward" or operator.source < 0:
        return False
    old, new = operator.inputs[0], operator.outputs[0]
    return not old.is_contiguous and new.is_contiguous and new.num_elements >= _FEWEST_ELEMENTS


RULE = rule(__name__, check, propose=propose, title="A copy that only changes the layout", rewrites_line=True)
