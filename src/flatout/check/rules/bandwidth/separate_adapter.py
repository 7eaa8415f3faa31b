"""A low-rank adapter is multiplied beside its layer and added to the layer's result.

Costs        The adapter's second product writes an array as large as the layer's result, which is scaled and added in passes of
             their own; in the backward pass another as large as the layer's input.
Evidence     In a step, a sum of two products of one tensor, one of them through a rank of at most a quarter of its sides, for so
             many rows that passes over the results cost more than passes over the weight. Trial: the same sizes apart, and as one
             product with the adapter added to the weight, forward and backward.
Levers       graph.merge-adapter
False alarm  An adapter that is switched or dropped out between its products and the sum: the lever refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Final, NamedTuple

from flatout.blocks.kernels.lora_linear.sizes import has_enough_rows
from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeLoraLinear
from flatout.machine.cost.accounting import around, group_by, milliseconds, rows_at
from flatout.machine.cost.suspects import PricedSuspect, proposing, tried

_INPUT_AT: Final = {"aten.addmm": 1, "aten.mm": 0}
_ADDS: Final = ("aten.add", "aten.add_")
_CASTS: Final = frozenset({"aten._to_copy", "aten._unsafe_view", "aten.view"})
_SCALES: Final = _CASTS | {"aten.mul", "aten.mul_", "aten.div", "aten.div_"}
_ITS_OWN: Final = frozenset({*_INPUT_AT, *_ADDS, *_SCALES})
_LEAST_RATIO: Final = 4
"""Of the layer's smaller side to the rank: the products of a wider pair are no small part of the work."""
_WORTH_A_TRIAL: Final = 0.02
_NOISE: Final = 0.02
"""The share of what was timed that no trial tells from noise. Without it a trial in float32 promised a Llama-like 1B at most 2 %
of the step that mixed precision had left; with four times as many rows the lever saves 10 % (H200)."""


class _AdaptedLayers(NamedTuple):
    rows: tuple[int, ...]
    """Operators of the layers and their adapters, forward and backward."""
    trial: TimeLoraLinear
    source: int
    """The line of the sum."""
    others: tuple[int, ...]


class _TracedProduct(NamedTuple):
    """A product in the trace: its call, the call that made its input, and its sizes."""

    call: int
    maker: int
    rows: int
    num_in: int
    num_out: int


class _AdaptedCall(NamedTuple):
    add: int
    layer: _TracedProduct
    down: _TracedProduct
    up: _TracedProduct


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that adds adapters to layers."""
    for source, items in group_by(tried(evidence, _adapted_layers), lambda item: item.suspect.source).items():
        cost_s, saved_s = sum(i.cost_s for i in items), sum(i.saved_s for i in items)
        if not cost_s:
            continue
        largest = max(items, key=lambda item: item.saved_s).suspect.trial
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=_with_doubt(saved_s, cost_s),
            because=f"{_sizes(items)} and adapters of rank {largest.rank} beside them, {milliseconds(cost_s)} a step; "
            f"with the adapter added to the weight one product takes {1 - saved_s / cost_s:.0%} (tried)",
            edit="flatout.lora_linear(x, layer, down, up, scale=...), which multiplies by W + scale * up @ down and makes no "
            "gradient of a frozen W",
            also=evidence.sources_of(dict.fromkeys(s for i in items for s in i.suspect.others)),
            module=evidence.operators[items[0].suspect.rows[0]].module,
            operators=tuple(sorted({row for item in items for row in item.suspect.rows})),
            basis="trial",
        )


def _with_doubt(saved_s: float, cost_s: float) -> tuple[float, float]:
    """What is saved, at least and at most: float32 products hide passes over arrays that count once products are in 16 bits."""
    low, high = around(saved_s, 0.3)
    return low, max(high, saved_s + _NOISE * cost_s)


def _sizes(items: list[PricedSuspect[_AdaptedLayers]]) -> str:
    sizes = dict.fromkeys(f"{i.suspect.trial.in_features} to {i.suspect.trial.out_features}" for i in items)
    return f"linear layers of {' and '.join(list(sizes)[:3])}{' and others' if len(sizes) > 3 else ''}"


def _adapted_layers(evidence: Evidence) -> Iterator[_AdaptedLayers]:
    """The adapted layers of each line and size."""
    calls = group_by(
        _adapted_calls(evidence), lambda c: (evidence.operators[_row(evidence, c.add)].source, *c.layer[2:])
    )
    for (source, *_), found in calls.items():
        forward = {_row(evidence, c) for a in found for c in (a.add, a.layer.call, a.down.call, a.up.call)}
        sources = {evidence.operators[row].source for row in forward}
        modules = {evidence.operators[row].module for row in forward}
        rows = [i for i in rows_at(evidence, sources) if evidence.operators[i].module in modules]
        rows = [i for i in rows if evidence.operators[i].op in _ITS_OWN]
        backward = [evidence.operators[i] for i in rows if evidence.operators[i].phase == "backward"]
        first = found[0]
        layer = evidence.operators[_row(evidence, first.layer.call)]
        # Of x and of the weight the gradient takes as much work as the product itself.
        num_wide = sum(o.num_calls for o in backward if o.op in _INPUT_AT and o.flop >= layer.flop)
        trial = TimeLoraLinear(
            rows=first.layer.rows,
            in_features=first.layer.num_in,
            out_features=first.layer.num_out,
            rank=first.down.num_out,
            dtype=layer.outputs[0].dtype,
            bias=layer.op == "aten.addmm",
            frozen=num_wide <= len(found),
            backward=bool(backward),
        )
        yield _AdaptedLayers(tuple(rows), trial, source, tuple(sorted(sources - {source})))


def _row(evidence: Evidence, call: int) -> int:
    return evidence.trace.operator[call]


def _adapted_calls(evidence: Evidence) -> Iterator[_AdaptedCall]:
    """Sums in the forward pass of a product and of two narrow ones on the same input."""
    trace = evidence.trace
    for add, row in enumerate(trace.operator):
        operator = evidence.operators[row]
        if operator.op not in _ADDS or operator.phase == "backward" or operator.source < 0:
            continue
        if len(trace.producers[add]) != 2:
            continue
        for one, other in permutations(trace.producers[add]):
            layer, up = _product(evidence, one, through=_CASTS), _product(evidence, other, through=_SCALES)
            if layer is None or up is None or layer.call == up.call:
                continue
            down = _product(evidence, up.maker, through=_SCALES)
            if down is not None and _is_adapter(layer, down, up):
                yield _AdaptedCall(add, layer, down, up)
                break


def _is_adapter(layer: _TracedProduct, down: _TracedProduct, up: _TracedProduct) -> bool:
    sizes = (down.rows, down.num_in, up.rows, up.num_in, up.num_out)
    return (
        sizes == (layer.rows, layer.num_in, layer.rows, down.num_out, layer.num_out)
        and down.maker == layer.maker
        and _LEAST_RATIO * down.num_out <= min(layer.num_in, layer.num_out)
        and has_enough_rows(layer.rows, num_out=layer.num_out, num_in=layer.num_in)
    )


def _product(evidence: Evidence, call: int, *, through: frozenset[str]) -> _TracedProduct | None:
    """The product behind a call; None where there is another operator."""
    call = _behind(evidence, call, through)
    if call < 0:
        return None
    operator: Operator = evidence.operators[_row(evidence, call)]
    place, producers = _INPUT_AT.get(operator.op), evidence.trace.producers[call]
    if place is None or len(producers) != place + 2:
        return None
    rows, num_in = operator.inputs[place].shape
    return _TracedProduct(
        call, _behind(evidence, producers[place], _CASTS), rows, num_in, operator.outputs[0].shape[-1]
    )


def _behind(evidence: Evidence, call: int, through: frozenset[str]) -> int:
    """The first call, from here back along first inputs, that is none of these operators; -1 from before the step."""
    while call >= 0 and evidence.operators[_row(evidence, call)].op in through:
        producers = evidence.trace.producers[call]
        call = producers[0] if producers else -1
    return call


RULE = rule(
    __name__,
    check,
    propose=proposing(_adapted_layers, worth=_WORTH_A_TRIAL),
    title="A low-rank adapter beside its layer",
    rewrites_line=True,
)
