"""Several linear layers take the same input where one product would do.

Costs        A product of its own for each, smaller and less efficient than one of them all, its dispatch, and in the backward a
             gradient of the input each, which are then added.
Evidence     Products in a step that read the same tensor with different weights. Trial: the same layers one by one, and as one
             product with the weights stacked, forward and backward.
Levers       graph.merge-products
False alarm  Products so large that nothing is gained: the trial says so. Layers that read different parts of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, group_by, has_backward, kept_fraction, milliseconds, result_of, seconds_of
from flatout.cost.trace import consumers
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeMergedLinears

_INPUT_AT = {"aten.addmm": 1, "aten.mm": 0}
_PARTS = frozenset(
    f"aten.{name}"
    for name in [
        "slice",
        "split",
        "split_with_sizes",
        "select",
        "unbind",
        "chunk",
        "narrow",
        "index",
        "index_select",
        "as_strided",
    ]
)
_WORTH_A_TRIAL = 0.05


def propose(evidence: Evidence) -> Iterator[TimeMergedLinears]:
    """Time each set of layers as one."""
    for calls in _sets(evidence):
        rows = _rows(evidence, calls)
        if seconds_of(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield _trial_of(evidence, calls, rows)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per place; the layers of a deep model share it."""
    for calls in _sets(evidence):
        rows = _rows(evidence, calls)
        trial = _trial_of(evidence, calls, rows)
        result = result_of(evidence, trial)
        if result is None:
            continue
        cost_s, kept = seconds_of(evidence, rows), kept_fraction(result)
        sources = dict.fromkeys(evidence.operators[evidence.trace.operator[c]].source for c in calls)
        lines = [s for s in map(evidence.source_of, sources) if s is not None]
        yield Finding(
            rule=RULE.id,
            regime="overhead",
            where=lines[0],
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - kept), 0.2),
            because=f"{len(calls)} linear layers of {trial.in_features} to {_widths(trial)} read the same tensor, "
            f"{milliseconds(cost_s)} a step; as one product they take {kept:.0%} (tried)",
            edit=f"one nn.Linear({trial.in_features}, {sum(trial.out_features)}) in their place, its result .split() into theirs",
            also=tuple(lines[1:]),
            module=evidence.operators[rows[0]].module.rpartition(".")[0],
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def _sets(evidence: Evidence) -> list[list[int]]:
    """Calls of the trace that multiply one tensor by different weights; one set for each combination of lines."""
    trace, operators = evidence.trace, evidence.operators
    products = []
    for call, row in enumerate(trace.operator):
        operator, producers = operators[row], trace.producers[call]
        place = _INPUT_AT.get(operator.op)
        if place is None or operator.phase == "backward" or operator.source < 0 or len(producers) != place + 2:
            continue
        if producers[place] >= 0 and producers[place + 1] < 0 and operator.inputs[place].is_contiguous:
            products.append(call)
    if not products:
        return []
    readers = consumers(trace)

    def key(call: int) -> tuple[int, tuple[int, ...], str]:
        operator = operators[trace.operator[call]]
        place = _INPUT_AT[operator.op]
        return trace.producers[call][place], operator.inputs[place].shape, operator.op

    sets = [
        calls
        for (producer, _, _), calls in group_by(products, key).items()
        if len(calls) > 1 and not any(operators[trace.operator[r]].op in _PARTS for r in readers.get(producer, ()))
    ]
    by_lines = group_by(sets, lambda calls: tuple(sorted({operators[trace.operator[c]].source for c in calls})))
    return [max(found, key=len) for found in by_lines.values()]


def _rows(evidence: Evidence, calls: list[int]) -> tuple[int, ...]:
    """The products of these lines, forward and backward, on this width."""
    operators = [evidence.operators[evidence.trace.operator[c]] for c in calls]
    sources = {o.source for o in operators}
    width = operators[0].inputs[_INPUT_AT[operators[0].op]].shape[-1]
    return tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.source in sources and o.op in _INPUT_AT and any(width in t.shape for t in o.inputs + o.outputs)
    )


def _trial_of(evidence: Evidence, calls: list[int], rows: tuple[int, ...]) -> TimeMergedLinears:
    operators = [evidence.operators[evidence.trace.operator[c]] for c in calls]
    first = operators[0]
    tensor = first.inputs[_INPUT_AT[first.op]]
    return TimeMergedLinears(
        rows=tensor.shape[0],
        in_features=tensor.shape[1],
        out_features=tuple(o.outputs[0].shape[-1] for o in operators),
        dtype=tensor.dtype,
        bias=first.op == "aten.addmm",
        backward=has_backward(evidence, rows),
    )


def _widths(trial: TimeMergedLinears) -> str:
    widths = dict.fromkeys(trial.out_features)
    return " and ".join(map(str, widths)) if len(widths) <= 3 else f"{min(widths)}-{max(widths)}"


RULE = Rule(
    id="overhead.split-linears",
    title="Linear layers that one product would do",
    module=__name__,
    check=check,
    propose=propose,
    levers=("graph.merge-products",),
)
