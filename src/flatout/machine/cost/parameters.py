"""Loops over a model's parameters that are written in Python: which lines run them, found by count and shape."""

from __future__ import annotations

from flatout.core.records.evidence import Evidence
from flatout.machine.cost.accounting import facts_named, group_by
from flatout.machine.cost.lines import function_finder

_FEWEST = 8
_MOST_OF_THEM = 0.5
_PHASES = ("other", "optimizer")


def parameter_loops(evidence: Evidence) -> dict[tuple[str, str], tuple[int, ...]]:
    """Loops over parameters: by (file, function), the operators that run once for most tensors an optimizer holds, outside
    forward and backward.

    The walk of torch's own optimizers over their parameters does not count.
    """
    facts = facts_named(evidence, "parameter-shapes")
    shapes = {shape for f in facts for shape in f.text.split(",")}
    num = max((int(f.value) for f in facts), default=0)
    own = {o.source for o in evidence.optimizers if o.variant != "own"}
    rows = [
        i
        for i, o in enumerate(evidence.operators)
        if o.phase in _PHASES and o.source >= 0 and o.source not in own and o.inputs and o.bytes > 0
    ]
    fitting = [i for i in rows if "x".join(map(str, evidence.operators[i].inputs[0].shape)) in shapes]
    by_line = group_by(fitting, lambda i: evidence.operators[i].source)
    loops = []
    function_of = function_finder(evidence)
    for mine in by_line.values():
        calls = max(
            sum(evidence.operators[i].num_calls for i in g)
            for g in group_by(mine, lambda i: evidence.operators[i].op).values()
        )
        kinds = {evidence.operators[i].inputs[0].shape for i in mine}
        if num and calls >= max(_FEWEST, _MOST_OF_THEM * num) and len(kinds) > 1:
            loops += [i for i in rows if evidence.operators[i].source == evidence.operators[mine[0]].source]
    return {
        place: tuple(found)
        for place, found in group_by(loops, lambda i: function_of(evidence.operators[i].source)).items()
    }
