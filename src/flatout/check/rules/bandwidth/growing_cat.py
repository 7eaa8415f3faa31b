"""A tensor is grown piece by piece with torch.cat.

Costs        Every append copies all that was gathered before: quadratic in the number of pieces, and again in the backward.
             So is reading a piece of it that the next iteration needs: its gradient is a tensor of zeros of the whole length.
Evidence     torch.cat on one line, many times a step, its first input the result of the time before. Trial: the same pieces
             appended one by one against one cat at the end, forward and backward. What reading costs in the backward is timed.
Levers       memory.gather-once
False alarm  A cat of two things once, or of few pieces.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator, TensorSpec
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeGrowingCat
from flatout.machine.cost.accounting import around, group_by, has_backward, operator_seconds, rows_at
from flatout.machine.cost.suspects import proposing, tried

_FEWEST = 6
_READS = frozenset(f"aten.{n}" for n in ("select", "slice", "index", "index_select", "narrow"))
_WORTH_A_TRIAL = 0.03


class _Growing(NamedTuple):
    rows: tuple[int, ...]
    """The cat and its backward."""
    trial: TimeGrowingCat
    num_appended: int
    reading: tuple[int, ...]
    """Backward operators, as long as all that was gathered, of lines that read one piece of it."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    yield from _growing_over_steps(evidence)
    for cat in tried(evidence, _growing):
        reading = cat.suspect.reading
        reading_s = operator_seconds(evidence, reading)
        yield Finding(
            where=evidence.source_of(evidence.operators[cat.suspect.rows[0]].source),
            cost_s=cat.cost_s + reading_s,
            saved_s=around(cat.cost_s * (1 - cat.remaining) + reading_s, 0.15),
            because=f"torch.cat appends {cat.suspect.num_appended} times a step to its own result, {cat.cost_s * 1e3:.2f} ms "
            f"forward and backward; one cat at the end takes {cat.remaining:.0%} of that (tried)"
            + (f"; reading a piece of it fills {reading_s * 1e3:.2f} ms of gradients with zeros" if reading else ""),
            edit="append the pieces to a list and torch.cat (or torch.stack) once after the loop"
            + (", and read the last piece from the list" if reading else ""),
            operators=cat.suspect.rows + reading,
            basis="trial",
        )


def _growing_over_steps(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line whose cat has a longer first input in every step: a bank, a history, a cache."""
    cats = [i for i, o in enumerate(evidence.operators) if _is_cat(o)]
    for source, rows in group_by(cats, lambda i: evidence.operators[i].source).items():
        firsts = sorted({evidence.operators[i].inputs[0].num_elements for i in rows})
        pieces = {evidence.operators[i].inputs[-1].shape for i in rows}
        # It has another length in every step looked at, so no row is called once in each.
        is_once_a_step = all(evidence.operators[i].num_calls < 1 for i in rows)
        is_long = firsts[0] >= 2 * evidence.operators[rows[0]].inputs[-1].num_elements
        if not is_once_a_step or len(firsts) < 2 or len(pieces) > 1 or not is_long:
            continue
        sampled_s = sum(r.seconds for r in evidence.lines if r.source == source and r.process == "main")
        cost_s = max(operator_seconds(evidence, rows), sampled_s)
        # The piece itself is copied all the same.
        saved_s = cost_s * (1 - evidence.operators[rows[0]].inputs[-1].num_elements / statistics.mean(firsts))
        yield Finding(
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=around(saved_s, 0.15),
            because=f"torch.cat copies all that earlier steps gathered to append {'x'.join(map(str, pieces.pop()))}; "
            f"{cost_s * 1e3:.2f} ms of the mean step seen, and more with every step",
            edit="append to a list and torch.cat once at the end, or write into a tensor allocated for all steps",
            operators=tuple(rows),
        )


def _growing(evidence: Evidence) -> Iterator[_Growing]:
    """Lines whose cat appends to the result of another call of the same line."""
    trace, operators = evidence.trace, evidence.operators
    ran = [operators[row] for row in trace.operator]
    cats = [c for c, o in enumerate(ran) if _is_cat(o)]
    for source, calls in group_by(cats, lambda c: ran[c].source).items():
        mine = set(calls)
        appended = [c for c in calls if trace.producers[c] and trace.producers[c][0] in mine]
        if len(appended) >= _FEWEST:
            at_line = rows_at(evidence, (source,))
            rows = tuple(i for i in at_line if operators[i].op == "aten.cat" or operators[i].phase == "backward")
            trial = _trial_of(ran[appended[-1]], backward=has_backward(evidence, rows))
            yield _Growing(rows, trial, len(appended), _reading(evidence, mine, ran[appended[-1]].inputs[-1]))


def _reading(evidence: Evidence, cats: set[int], piece: TensorSpec) -> tuple[int, ...]:
    """Backward operators on what is longer than a piece, of lines that read no more than one piece of the result of a cat."""
    trace, operators = evidence.trace, evidence.operators
    lines = {
        operators[row].source
        for call, row in enumerate(trace.operator)
        if operators[row].op in _READS and operators[row].outputs and not cats.isdisjoint(trace.producers[call])
        if operators[row].outputs[0].num_elements <= piece.num_elements
    }
    return tuple(
        i
        for i, o in enumerate(operators)
        if o.source in lines and o.phase == "backward" and o.outputs and o.outputs[0].num_elements > piece.num_elements
    )


def _is_cat(operator: Operator) -> bool:
    return operator.op == "aten.cat" and operator.phase != "backward" and operator.source >= 0


def _trial_of(last: Operator, *, backward: bool) -> TimeGrowingCat:
    piece, whole = last.inputs[-1], last.outputs[0]
    dim = next((d for d, (a, b) in enumerate(zip(piece.shape, whole.shape, strict=True)) if a != b), 0)
    count = max(2, whole.shape[dim] // max(1, piece.shape[dim]))
    return TimeGrowingCat(piece=piece.shape, dim=dim, count=count, dtype=piece.dtype, backward=backward)


RULE = rule(
    __name__,
    check,
    propose=proposing(_growing, worth=_WORTH_A_TRIAL),
    title="A tensor grown piece by piece",
    rewrites_line=True,
)
