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
from typing import NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeMergedLinears
from flatout.machine.cost.accounting import around, group_by, has_backward, milliseconds, rows_at
from flatout.machine.cost.suspects import proposing, tried
from flatout.machine.cost.trace import consumers

_INPUT_AT = {"aten.addmm": 1, "aten.mm": 0}
_PART_NAMES = "slice split split_with_sizes select unbind chunk narrow index index_select as_strided"
_PARTS = frozenset(f"aten.{name}" for name in _PART_NAMES.split())
_WORTH_A_TRIAL = 0.05


class _SplitLayers(NamedTuple):
    rows: tuple[int, ...]
    """The products of these lines, forward and backward, on this width."""
    trial: TimeMergedLinears
    sources: tuple[int, ...]


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per place; the layers of a deep model share it."""
    for layers in tried(evidence, _split_layers):
        rows, trial, sources = layers.suspect
        yield Finding(
            where=evidence.source_of(sources[0]),
            cost_s=layers.cost_s,
            saved_s=around(layers.saved_s, 0.2),
            because=f"{len(trial.out_features)} linear layers of {trial.in_features} to {_widths(trial)} read the same tensor, "
            f"{milliseconds(layers.cost_s)} a step; as one product they take {layers.remaining:.0%} (tried)",
            edit=f"one nn.Linear({trial.in_features}, {sum(trial.out_features)}) in their place, its result .split() into theirs",
            also=evidence.sources_of(sources),
            module=evidence.operators[rows[0]].module.rpartition(".")[0],
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
    # One row that reads one tensor twice is one layer, run again: a discriminator on the same images.
    products = list({(trace.operator[call], trace.producers[call]): call for call in products}.values())
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


def _split_layers(evidence: Evidence) -> Iterator[_SplitLayers]:
    for calls in _sets(evidence):
        layers = [evidence.operators[evidence.trace.operator[c]] for c in calls]
        first, sources = layers[0], tuple(dict.fromkeys(o.source for o in layers))
        tensor = first.inputs[_INPUT_AT[first.op]]
        width = tensor.shape[-1]
        products = [i for i in rows_at(evidence, sources) if evidence.operators[i].op in _INPUT_AT]
        tensors = {i: evidence.operators[i].inputs + evidence.operators[i].outputs for i in products}
        rows = tuple(i for i in products if any(width in t.shape for t in tensors[i]))
        trial = TimeMergedLinears(
            rows=tensor.shape[0],
            in_features=tensor.shape[1],
            out_features=tuple(o.outputs[0].shape[-1] for o in layers),
            dtype=tensor.dtype,
            bias=first.op == "aten.addmm",
            backward=has_backward(evidence, rows),
        )
        yield _SplitLayers(rows, trial, sources)


def _widths(trial: TimeMergedLinears) -> str:
    widths = dict.fromkeys(trial.out_features)
    return " and ".join(map(str, widths)) if len(widths) <= 3 else f"{min(widths)}-{max(widths)}"


RULE = rule(
    __name__,
    check,
    propose=proposing(_split_layers, worth=_WORTH_A_TRIAL),
    title="Linear layers that one product would do",
    rewrites_line=True,
)
