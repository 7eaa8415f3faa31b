"""Distances between all pairs, by subtracting everything from everything.

Costs        N x M x D differences are written to memory, read, squared, written, read and added up, and all that again in the
             backward; one matrix product of N x D by D x M gives the same.
Evidence     A difference whose result is far larger than both inputs, squared (or made positive) and added up over its last
             dimension. Trial: at these shapes against torch.cdist, and against |a|^2 + |b|^2 - 2 a b; the faster counts.
Levers       graph.pairwise-product
False alarm  Differences that are used for something else too (directions, not only lengths): their trial is not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeDistance
from flatout.machine.cost.accounting import has_backward, rows_at
from flatout.machine.cost.suspects import proposing, tried
from flatout.machine.cost.trace import consumers

_LARGER: Final = 4
_WORTH_A_TRIAL: Final = 0.04
_SQUARES: Final = ("aten.pow", "aten.mul", "aten.square")
_SUMS: Final = ("aten.sum", "aten.mean")
_NORM: Final = "aten.linalg_vector_norm"
_EDITS: Final = {
    "torch.cdist": "torch.cdist(a, b) (or its square) in place of ((a[:, None] - b[None]) ** 2).sum(-1)",
    "one product": "squares = a.square().sum(-1)[:, None] + b.square().sum(-1); (squares - 2 * a @ b.T).clamp_min(0) in place of "
    "((a[:, None] - b[None]) ** 2).sum(-1)",
}


class _Distance(NamedTuple):
    rows: tuple[int, ...]
    """What makes up a distance, the difference first."""
    trial: TimeDistance


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per difference."""
    for distance in tried(evidence, _distances):
        (rows, trial), result = distance.suspect, distance.result
        worst = f", largest difference {result.error:.0e} of the largest distance" if result.error is not None else ""
        yield Finding(
            where=evidence.source_of(evidence.operators[rows[0]].source),
            cost_s=distance.cost_s,
            saved_s=(0.8 * distance.saved_s, distance.saved_s),
            because=f"{trial.num_a} x {trial.num_b} differences of {trial.dim} numbers each are written out, "
            f"{distance.cost_s * 1e3:.2f} ms a step; {result.variant or 'torch.cdist'} takes {distance.remaining:.0%} of that "
            f"(tried{worst})",
            edit=_EDITS.get(result.variant, _EDITS["torch.cdist"]),
            operators=rows,
            basis="trial",
        )


def _distances(evidence: Evidence) -> Iterator[_Distance]:
    trace, operators = evidence.trace, evidence.operators
    forward_calls = {c for c, row in enumerate(trace.operator) if operators[row].phase != "backward"}
    readers = {call: [r for r in rs if r in forward_calls] for call, rs in consumers(trace).items()}
    claimed: set[int] = set()
    for call, row in enumerate(trace.operator):
        if row in claimed or operators[row].phase == "backward" or not _is_pairwise(operators[row]):
            continue
        claimed.add(row)
        squares = readers.get(call, [])
        forward = [row]
        if squares and all(_reduces_last(operators[trace.operator[c]], (_NORM,)) for c in squares):
            forward += [trace.operator[c] for c in squares]
        elif squares and all(operators[trace.operator[c]].op in _SQUARES for c in squares):
            sums = [s for c in squares for s in readers.get(c, [])]
            if not sums or not all(_reduces_last(operators[trace.operator[s]], _SUMS) for s in sums):
                continue
            forward += [trace.operator[c] for c in (*squares, *sums)]
        else:
            continue
        lines = {operators[i].source for i in forward}
        backward = [i for i in rows_at(evidence, lines) if operators[i].phase == "backward"]
        rows = tuple(dict.fromkeys([*forward, *backward]))
        yield _Distance(rows, _trial(operators[row], is_backward=has_backward(evidence, rows)))


def _is_pairwise(operator: Operator) -> bool:
    if operator.op != "aten.sub" or len(operator.inputs) != 2 or operator.source < 0:
        return False
    a, b = operator.inputs
    out = operator.outputs[0]
    return (
        len(out.shape) >= 3
        and len(a.shape) == len(b.shape) == len(out.shape)
        and a.shape[-1] == b.shape[-1] == out.shape[-1] > 1
        # One of the two is repeated along each of the dimensions before the last, and along no other.
        and [d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        == [len(out.shape) - 3, len(out.shape) - 2]
        and out.num_elements >= _LARGER * max(a.num_elements, b.num_elements)
    )


def _reduces_last(operator: Operator, names: tuple[str, ...]) -> bool:
    return (
        operator.op in names
        and bool(operator.inputs)
        and operator.outputs[0].shape in (operator.inputs[0].shape[:-1], (*operator.inputs[0].shape[:-1], 1))
    )


def _trial(difference: Operator, *, is_backward: bool) -> TimeDistance:
    shape = difference.outputs[0].shape
    return TimeDistance(
        batch=prod(shape[:-3]),
        num_a=shape[-3],
        num_b=shape[-2],
        dim=shape[-1],
        dtype=difference.outputs[0].dtype,
        backward=is_backward,
    )


RULE = rule(
    __name__,
    check,
    propose=proposing(_distances, worth=_WORTH_A_TRIAL),
    title="All pairs of differences written out for a distance",
    rewrites_line=True,
)
