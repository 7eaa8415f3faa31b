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
from typing import Final

from flatout.cost.accounting import has_backward, kept_fraction, result_of, rows_at, seconds_of
from flatout.cost.trace import consumers
from flatout.records.evidence import Evidence, Operator, TensorSpec
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeDistance

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


def propose(evidence: Evidence) -> Iterator[TimeDistance]:
    """Time each such distance against forms that write no differences."""
    for rows, trial in _distances(evidence):
        if seconds_of(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per difference."""
    for rows, trial in _distances(evidence):
        result = result_of(evidence, trial)
        if result is None:
            continue
        cost_s, kept = seconds_of(evidence, rows), kept_fraction(result)
        worst = f", largest difference {result.error:.0e} of the largest distance" if result.error is not None else ""
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=evidence.source_of(evidence.operators[rows[0]].source),
            cost_s=cost_s,
            saved_s=(0.8 * cost_s * max(0.0, 1 - kept), cost_s * max(0.0, 1 - kept)),
            because=f"{trial.num_a} x {trial.num_b} differences of {trial.dim} numbers each are written out, "
            f"{cost_s * 1e3:.2f} ms a step; {result.variant or 'torch.cdist'} takes {kept:.0%} of that (tried{worst})",
            edit=_EDITS.get(result.variant, _EDITS["torch.cdist"]),
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def _distances(evidence: Evidence) -> Iterator[tuple[tuple[int, ...], TimeDistance]]:
    """(rows that a distance is made of, the difference first; its trial)."""
    trace, operators = evidence.trace, evidence.operators
    forward_calls = {c for c, row in enumerate(trace.operator) if operators[row].phase != "backward"}
    readers = {call: [r for r in rs if r in forward_calls] for call, rs in consumers(trace).items()}
    told: set[int] = set()
    for call, row in enumerate(trace.operator):
        if row in told or operators[row].phase == "backward" or not _is_pairwise(operators[row]):
            continue
        told.add(row)
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
        yield rows, _trial(operators[row], is_backward=has_backward(evidence, rows))


def _is_pairwise(operator: Operator) -> bool:
    if operator.op != "aten.sub" or len(operator.inputs) != 2 or operator.source < 0:
        return False
    a, b = operator.inputs
    out = operator.outputs[0]
    return (
        len(out.shape) >= 3
        and len(a.shape) == len(b.shape) == len(out.shape)
        and a.shape[-1] == b.shape[-1] == out.shape[-1] > 1
        and _pair_dims(a, b) == (len(out.shape) - 3, len(out.shape) - 2)
        and out.num_elements >= _LARGER * max(a.num_elements, b.num_elements)
    )


def _pair_dims(a: TensorSpec, b: TensorSpec) -> tuple[int, ...]:
    """The dimensions along which one of the two is repeated."""
    return tuple(d for d, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)


def _reduces_last(operator: Operator, names: tuple[str, ...]) -> bool:
    return (
        operator.op in names
        and bool(operator.inputs)
        and operator.outputs[0].shape in (operator.inputs[0].shape[:-1], (*operator.inputs[0].shape[:-1], 1))
    )


def _trial(difference: Operator, *, is_backward: bool) -> TimeDistance:
    shape = difference.outputs[0].shape
    batch = 1
    for size in shape[:-3]:
        batch *= size
    return TimeDistance(
        batch=batch,
        num_a=shape[-3],
        num_b=shape[-2],
        dim=shape[-1],
        dtype=difference.outputs[0].dtype,
        backward=is_backward,
    )


RULE = Rule(
    id="bandwidth.broadcast-distance",
    title="All pairs of differences written out for a distance",
    module=__name__,
    check=check,
    propose=propose,
    levers=("graph.pairwise-product",),
)
