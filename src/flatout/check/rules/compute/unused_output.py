"""Something is computed in every step that nobody uses.

Costs        The operators, whose results reach neither the loss, nor a value read by Python, nor anything that outlives the step.
Evidence     The data flow of a deep step, walked back from all that is used: the backward, the optimizer, host reads, results
             handed to NumPy or pickled, writes into older memory, and tensors still alive two steps later.
Levers       graph.remove-dead-code
False alarm  A figure that is read every hundredth step: it was read in none of the steps looked at, and the saving is real if it
             is computed only then.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import around, group_by, milliseconds
from flatout.machine.cost.families import COMPILED_GRAPH
from flatout.machine.cost.lines import function_finder

_READS = frozenset(
    f"aten.{n}"
    for n in ["_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero"]
)
_USED = _READS | {COMPILED_GRAPH}
"""Read by Python, or compiled: what such code writes in place, as a compiled optimizer does, is not known."""
_JUDGED = ("forward", "other", "transfer")
"""Phases whose results must be used by what follows."""
_SHARDED = ("c10d.", "_c10d_functional.", "fsdp.")
_SMALLEST_FRACTION = 0.01


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function whose results are not used."""
    function_of = function_finder(evidence)
    for mine in group_by(
        _dead_seconds(evidence).items(), lambda item: function_of(evidence.operators[item[0]].source)
    ).values():
        seconds = dict(mine)
        cost_s = sum(seconds.values())
        if cost_s < _SMALLEST_FRACTION * evidence.steps.step_s:
            continue
        by_line = group_by(seconds, lambda i: evidence.operators[i].source)
        hottest = max(by_line, key=lambda s: sum(seconds[i] for i in by_line[s]))
        yield Finding(
            where=evidence.source_of(hottest),
            cost_s=cost_s,
            saved_s=around(cost_s, 0.1),
            because="what these lines compute reaches neither the loss nor anything that was read or kept in the steps "
            f"looked at; {milliseconds(cost_s)} a step",
            edit="leave it out, or compute it only in the steps that use it",
            also=evidence.sources_of(by_line),
            module=evidence.operators[max(seconds, key=lambda i: seconds[i])].module,
            operators=tuple(sorted(seconds)),
        )


def _dead_seconds(evidence: Evidence) -> dict[int, float]:
    """Operator -> seconds of its calls whose results are of no use."""
    trace, operators = evidence.trace, evidence.operators
    if trace.escapes is None or trace.truncated or evidence.steps.kind not in ("training", "call"):
        return {}
    if not any(o.phase == "backward" for o in operators):
        return {}  # what the loop is after cannot be told
    if any(o.op.startswith(_SHARDED) for o in operators):
        return {}  # data flow through sharded tensors and collectives is not followed
    escapes = set(trace.escapes)
    used = [
        c in escapes or operators[row].phase not in _JUDGED or operators[row].op in _USED
        for c, row in enumerate(trace.operator)
    ]
    for call in range(len(used) - 1, -1, -1):
        if used[call]:
            for producer in trace.producers[call]:
                if producer >= 0:
                    used[producer] = True
    dead: dict[int, int] = {}
    calls: dict[int, int] = {}
    for call, row in enumerate(trace.operator):
        calls[row] = calls.get(row, 0) + 1
        if not used[call] and operators[row].source >= 0 and operators[row].bytes > 0:  # views cost nothing
            dead[row] = dead.get(row, 0) + 1
    return {row: operators[row].total_s * num / calls[row] for row, num in dead.items()}


RULE = rule(__name__, check, title="Results that nobody uses", rewrites_line=True)
