"""A product with one-hot rows, where looking the rows up would do.

Costs        Rows x vocabulary numbers are written, nearly all of them zeros, and multiplied, forward and backward.
Evidence     A scatter into zeros (what torch's one_hot does) that ends in a matrix product. Trial: the same product against an
             embedding of the same size.
Levers       graph.embedding
False alarm  Soft labels and rows with several ones: the scatter then writes more than one number a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.cost.accounting import group_by, has_backward, kept_fraction, result_of, rows_at, seconds_of
from flatout.cost.trace import walk_back
from flatout.records.evidence import Evidence, Operator
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeOneHot

_PRODUCTS: Final = ("aten.mm", "aten.addmm", "aten.bmm")
_SCATTERS: Final = ("aten.scatter_", "aten.scatter")
_MOVES: Final = "_to_copy view _unsafe_view reshape expand unsqueeze squeeze transpose t clone"
_THROUGH: Final = frozenset(f"aten.{name}" for name in _MOVES.split())
_FEWEST_CLASSES: Final = 64
_WORTH_A_TRIAL: Final = 0.03
_NAMED: Final = 3


def propose(evidence: Evidence) -> Iterator[TimeOneHot]:
    """Time each such product against an embedding."""
    for _, rows, trial in _products(evidence):
        if seconds_of(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that makes one-hot rows for products."""
    tried = [(s, rows, t, r) for s, rows, t in _products(evidence) if (r := result_of(evidence, t)) is not None]
    for source, items in group_by(tried, lambda item: item[0]).items():
        rows = tuple(dict.fromkeys(row for _, mine, _, _ in items for row in mine))
        cost_s = seconds_of(evidence, rows)
        saved_s = sum(seconds_of(evidence, mine) * max(0.0, 1 - kept_fraction(r)) for _, mine, _, r in items)
        saved_s = min(saved_s, cost_s)
        kept = 1 - saved_s / cost_s if cost_s else 1.0
        sizes = " and ".join(f"{t.rows} rows of {t.classes} numbers" for _, _, t, _ in items[:_NAMED])
        tables = ", ".join(f"nn.Embedding({t.classes}, {t.width})" for _, _, t, _ in items[:_NAMED])
        yield Finding(
            rule=RULE.id,
            regime="compute",
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=(0.8 * saved_s, saved_s),
            because=f"{sizes}, all but one of them zero, are made and multiplied, "
            f"{cost_s * 1e3:.2f} ms a step; looking the rows up takes {max(0.0, kept):.0%} of that (tried)",
            edit=f"{tables} on the indices (its weight is the linear layer's, transposed)",
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def _products(evidence: Evidence) -> Iterator[tuple[int, tuple[int, ...], TimeOneHot]]:
    """(line of the one-hot rows, all rows of operators that go into making and multiplying them, the trial)."""
    trace, operators = evidence.trace, evidence.operators
    told: set[int] = set()
    for call, row in enumerate(trace.operator):
        product = operators[row]
        if product.op not in _PRODUCTS or product.phase == "backward" or row in told or product.source < 0:
            continue
        behind = list(walk_back(trace, operators, call, _THROUGH))
        scatters = [c for c in behind if _is_one_hot(operators[trace.operator[c]])]
        if not scatters:
            continue
        told.add(row)
        hot = operators[trace.operator[scatters[0]]]
        index = min((t for t in hot.inputs if t.dtype == "int64"), key=lambda t: t.num_elements)
        lines = {hot.source, product.source}
        making = [
            i
            for i in rows_at(evidence, {hot.source})
            if operators[i].phase != "backward" and _classes(hot) in _sizes(operators[i])
        ]
        multiplying = [
            i
            for i in rows_at(evidence, {product.source})
            if operators[i].op in _PRODUCTS and _classes(hot) in _sizes(operators[i])
        ]
        rows = tuple(dict.fromkeys([row, *making, *multiplying]))
        width = product.outputs[0].shape[-1]
        yield (
            hot.source,
            rows,
            TimeOneHot(
                rows=index.num_elements,
                classes=_classes(hot),
                width=width,
                dtype=product.outputs[0].dtype,
                backward=has_backward(evidence, rows_at(evidence, lines)),
            ),
        )


def _classes(scatter: Operator) -> int:
    return scatter.outputs[0].shape[-1]


def _sizes(operator: Operator) -> set[int]:
    return {size for t in operator.inputs + operator.outputs for size in t.shape}


def _is_one_hot(operator: Operator) -> bool:
    """Whether it writes one number into each row of its result."""
    if operator.op not in _SCATTERS or not operator.outputs or len(operator.outputs[0].shape) < 2:
        return False
    rows = operator.outputs[0].num_elements // max(1, _classes(operator))
    return _classes(operator) >= _FEWEST_CLASSES and any(
        t.dtype == "int64" and t.num_elements == rows for t in operator.inputs
    )


RULE = Rule(
    id="compute.one-hot-product",
    title="A product with one-hot rows",
    module=__name__,
    check=check,
    propose=propose,
    levers=("graph.embedding",),
)
