"""A layer computes rows of which only some are read.

Costs        The rows that a slice leaves out: their products, what is computed of them row by row (a log-softmax), and, in
             training, products with gradients that are all zeros.
Evidence     A product in forward whose result is read, by the order of a deep step, through slices along its rows alone. Trial:
             the same product with as many rows as are read.
Levers       graph.rows-as-read
False alarm  A model whose caller reads other rows in other steps: the steps looked at read no more than what is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator, TensorSpec, Trace
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimePaddedProduct
from flatout.machine.cost.accounting import group_by, milliseconds, operator_seconds
from flatout.machine.cost.suspects import proposing, tried
from flatout.machine.cost.trace import consumers

_PRODUCTS: Final = ("aten.mm", "aten.addmm")
_VIEW_NAMES: Final = """
view _unsafe_view reshape squeeze unsqueeze transpose t permute expand split chunk unbind select slice narrow alias detach
as_strided unsafe_split unsafe_split_with_sizes unsafe_chunk
"""
_VIEWS: Final = frozenset(f"aten.{name}" for name in _VIEW_NAMES.split())
"""They read nothing: what they make is read by operators with the smaller shape."""
_BY_ROW_NAMES: Final = "_log_softmax _softmax add div mul gelu relu tanh sigmoid"
_BY_ROW: Final = frozenset(f"aten.{name}" for name in _BY_ROW_NAMES.split())
"""Each row of their results comes from one row alone, where they read one tensor."""
_SELECTS: Final = frozenset({"aten.index", "aten.index_select", "aten.gather", "aten.embedding"})
_MOST_READ: Final = 0.75
"""Of the rows: with more, the slice costs what it gains."""
_WORTH_A_TRIAL: Final = 0.05


class _Unread(NamedTuple):
    rows: tuple[int, ...]
    """The operators that compute rows nobody reads: the product, what follows row by row, and their backward."""
    trial: TimePaddedProduct
    source: int
    reader: int
    """The line that reads some of the rows."""
    fraction: float
    """Of the rows, what is read."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that computes such rows."""
    for source, items in group_by(tried(evidence, _suspects), lambda item: item.suspect.source).items():
        largest = max(items, key=lambda item: item.saved_s)
        rows = tuple(dict.fromkeys(row for item in items for row in item.suspect.rows))
        cost_s = operator_seconds(evidence, rows)
        remaining = max(largest.remaining, largest.suspect.fraction)
        saved_s = cost_s * max(0.0, 1 - remaining)
        num, read = largest.suspect.trial.rows, largest.suspect.trial.padded[0]
        reader = evidence.source_of(largest.suspect.reader)
        at = f" ({reader.text})" if reader is not None and reader.text else ""
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=(0.8 * saved_s, saved_s),
            because=f"{num} rows of {largest.suspect.trial.columns} numbers are computed, {milliseconds(cost_s)} of the step, "
            f"and {read} of them are read{at}; the product of those takes {largest.remaining:.0%} of the time (tried)",
            edit="select the rows first, and give this layer those alone",
            also=(reader,) if reader is not None else (),
            module=evidence.operators[largest.suspect.rows[0]].module,
            operators=rows,
            basis="trial",
        )


def _suspects(evidence: Evidence) -> Iterator[_Unread]:
    """Products whose rows are read in part."""
    trace, operators = evidence.trace, evidence.operators
    if trace.escapes is None or trace.truncated:
        return
    readers, escapes = consumers(trace), set(trace.escapes)
    claimed: set[int] = set()
    for call, row in enumerate(trace.operator):
        product = operators[row]
        if product.op not in _PRODUCTS or product.phase == "backward" or row in claimed or product.source < 0:
            continue
        if not trace.producers[call] or trace.producers[call][-1] != -1:
            continue  # no layer: its second factor is no weight
        found = _reads(trace, operators, readers, escapes, call)
        if found is None:
            continue
        claimed.add(row)
        a, b = product.inputs[-2:]
        num, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
        read = max(1, round(found.fraction * num))
        trial = TimePaddedProduct(
            batch=1,
            rows=num,
            inner=inner,
            columns=columns,
            padded=(read, inner, columns),
            dtype=product.outputs[0].dtype,
            transposed=(False, True),
        )
        places = {(o.source, o.module) for o in (operators[trace.operator[c]] for c in found.calls)}
        full = _backward_of(evidence, product, places)
        own = [trace.operator[c] for c in found.full]
        yield _Unread(tuple(dict.fromkeys([row, *own, *full])), trial, product.source, found.reader, found.fraction)


class _Reads(NamedTuple):
    fraction: float
    full: tuple[int, ...]
    """Calls that computed all rows, besides the product."""
    calls: tuple[int, ...]
    reader: int


def _reads(
    trace: Trace, operators: tuple[Operator, ...], readers: dict[int, list[int]], escapes: set[int], product: int
) -> _Reads | None:
    """What is read of a product's rows; None where it is nearly all, or nothing, or not known."""
    outputs = operators[trace.operator[product]].outputs
    if not outputs or not outputs[0].shape:
        return None
    whole = outputs[0]
    columns = whole.shape[-1]
    frontier, full, calls, read, reader = [product], [product], [product], 0, -1
    while frontier:
        writer = frontier.pop()
        if writer in escapes:
            return None
        for call in readers.get(writer, ()):
            operator = operators[trace.operator[call]]
            calls.append(call)
            if operator.op in _VIEWS:
                frontier.append(call)  # torch's _unsafe_view makes a result of its own
                continue
            if operator.phase == "backward":
                continue  # it reads what was computed in forward, and nothing where the forward computes less
            tensor = _read_tensor(trace, operator, call, writer)
            if tensor is None or not tensor.shape or tensor.shape[-1] != columns:
                return None
            num = (
                operator.outputs[0].num_elements
                if operator.op in _SELECTS and operator.outputs
                else tensor.num_elements
            )
            if num < whole.num_elements:
                read, reader = read + num, operator.source  # perhaps of other rows
            elif operator.op in _BY_ROW and _num_large(operator, whole) == 1:
                frontier.append(call)
                full.append(call)
            else:
                return None
    fraction = read / max(1, whole.num_elements)
    return _Reads(fraction, tuple(full[1:]), tuple(calls), reader) if 0 < fraction <= _MOST_READ else None


def _read_tensor(trace: Trace, operator: Operator, call: int, writer: int) -> TensorSpec | None:
    """The largest tensor that this call reads of what `writer` wrote; None where that is not known."""
    pairs = zip(trace.producers[call], operator.inputs, strict=False)
    mine = [tensor for producer, tensor in pairs if producer == writer]
    return max(mine, key=lambda t: t.num_elements, default=None)


def _num_large(operator: Operator, whole: TensorSpec) -> int:
    return sum(t.num_elements == whole.num_elements for t in operator.inputs)


def _backward_of(evidence: Evidence, product: Operator, places: set[tuple[int, str]]) -> list[int]:
    """Backward operators of these lines and modules that read or write all rows."""
    whole = product.outputs[0]
    return [
        i
        for i, o in enumerate(evidence.operators)
        if o.phase == "backward"
        and (o.source, o.module) in places
        and any(prod(t.shape) == whole.num_elements and whole.shape[-1] in t.shape for t in o.inputs + o.outputs)
    ]


RULE = rule(
    __name__,
    check,
    propose=proposing(_suspects, worth=_WORTH_A_TRIAL),
    title="Rows are computed that nobody reads",
    rewrites_line=True,
)
