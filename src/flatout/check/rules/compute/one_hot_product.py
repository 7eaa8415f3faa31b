"""A product with one-hot rows, where looking the rows up would do.

Costs        Rows x vocabulary numbers are written, nearly all of them zeros, and multiplied, forward and backward.
Evidence     A scatter into zeros (what torch's one_hot does) that ends in a matrix product. Trial: the same product against an
             embedding of the same size.
Levers       graph.embedding
False alarm  Soft labels and rows with several ones: the scatter then writes more than one number a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeOneHot
from flatout.machine.cost.accounting import group_by, has_backward, operator_seconds, rows_at
from flatout.machine.cost.suspects import proposing, tried
from flatout.machine.cost.trace import walk_back

_PRODUCTS: Final = ("aten.mm", "aten.addmm", "aten.bmm")
_SCATTERS: Final = ("aten.scatter_", "aten.scatter")
_MOVES: Final = "_to_copy view _unsafe_view reshape expand unsqueeze squeeze transpose t clone"
_THROUGH: Final = frozenset(f"aten.{name}" for name in _MOVES.split())
_FEWEST_CLASSES: Final = 64
_WORTH_A_TRIAL: Final = 0.03
_NAMED: Final = 3


class _OneHot(NamedTuple):
    rows: tuple[int, ...]
    """All operators that go into making the one-hot rows and multiplying them."""
    trial: TimeOneHot
    source: int
    """The line of the one-hot rows."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that makes one-hot rows for products."""
    for source, items in group_by(tried(evidence, _products), lambda item: item.suspect.source).items():
        rows = tuple(dict.fromkeys(row for item in items for row in item.suspect.rows))
        cost_s = operator_seconds(evidence, rows)
        saved_s = min(cost_s, sum(item.saved_s for item in items))
        remaining = 1 - saved_s / cost_s if cost_s else 1.0
        trials = [item.suspect.trial for item in items[:_NAMED]]
        sizes = " and ".join(f"{t.rows} rows of {t.classes} numbers" for t in trials)
        tables = ", ".join(f"nn.Embedding({t.classes}, {t.width})" for t in trials)
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=(0.8 * saved_s, saved_s),
            because=f"{sizes}, all but one of them zero, are made and multiplied, "
            f"{cost_s * 1e3:.2f} ms a step; looking the rows up takes {max(0.0, remaining):.0%} of that (tried)",
            edit=f"{tables} on the indices (its weight is the linear layer's, transposed)",
            operators=rows,
            basis="trial",
        )


def _products(evidence: Evidence) -> Iterator[_OneHot]:
    """Products of one-hot rows."""
    trace, operators = evidence.trace, evidence.operators
    claimed: set[int] = set()
    for call, row in enumerate(trace.operator):
        product = operators[row]
        if product.op not in _PRODUCTS or product.phase == "backward" or row in claimed or product.source < 0:
            continue
        behind = (operators[trace.operator[c]] for c in walk_back(trace, operators, call, _THROUGH))
        hot = next(filter(_is_one_hot, behind), None)
        if hot is None:
            continue
        claimed.add(row)
        index = min((t for t in hot.inputs if t.dtype == "int64"), key=lambda t: t.num_elements)
        making = [i for i in _with_classes(evidence, hot, hot.source) if operators[i].phase != "backward"]
        multiplying = [i for i in _with_classes(evidence, hot, product.source) if operators[i].op in _PRODUCTS]
        trial = TimeOneHot(
            rows=index.num_elements,
            classes=_classes(hot),
            width=product.outputs[0].shape[-1],
            dtype=product.outputs[0].dtype,
            backward=has_backward(evidence, rows_at(evidence, {hot.source, product.source})),
        )
        yield _OneHot(tuple(dict.fromkeys([row, *making, *multiplying])), trial, hot.source)


def _with_classes(evidence: Evidence, hot: Operator, source: int) -> list[int]:
    """The operators of a line that touch a dimension as long as there are classes."""
    rows = rows_at(evidence, {source})
    tensors = {i: evidence.operators[i].inputs + evidence.operators[i].outputs for i in rows}
    return [i for i in rows if any(_classes(hot) in t.shape for t in tensors[i])]


def _classes(scatter: Operator) -> int:
    return scatter.outputs[0].shape[-1]


def _is_one_hot(operator: Operator) -> bool:
    """Whether it writes one number into each row of its result."""
    if operator.op not in _SCATTERS or not operator.outputs or len(operator.outputs[0].shape) < 2:
        return False
    rows = operator.outputs[0].num_elements // max(1, _classes(operator))
    return _classes(operator) >= _FEWEST_CLASSES and any(
        t.dtype == "int64" and t.num_elements == rows for t in operator.inputs
    )


RULE = rule(
    __name__,
    check,
    propose=proposing(_products, worth=_WORTH_A_TRIAL),
    title="A product with one-hot rows",
    rewrites_line=True,
)
