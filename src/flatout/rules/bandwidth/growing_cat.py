"""A tensor is grown piece by piece with torch.cat.

Costs        Every append copies all that was gathered before: quadratic in the number of pieces, and again in the backward.
Evidence     torch.cat on one line, many times a step, its first input the result of the time before. Trial: the same pieces
             appended one by one against one cat at the end, forward and backward.
Levers       memory.gather-once
False alarm  A cat of two things once, or of few pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import around, group_by, has_backward, kept_fraction, result_of, rows_at, seconds_of
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeGrowingCat

_FEWEST = 6
_WORTH_A_TRIAL = 0.03


def propose(evidence: Evidence) -> Iterator[TimeGrowingCat]:
    """Time each growing cat against one cat."""
    for source, calls in _growing(evidence).items():
        if seconds_of(evidence, _rows(evidence, source)) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield _trial_of(evidence, source, calls)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    yield from _growing_over_steps(evidence)
    for source, calls in _growing(evidence).items():
        rows = _rows(evidence, source)
        cost_s = seconds_of(evidence, rows)
        result = result_of(evidence, _trial_of(evidence, source, calls))
        if result is None:
            continue
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=around(cost_s * (1 - kept_fraction(result)), 0.15),
            because=f"torch.cat appends {len(calls)} times a step to its own result, {cost_s * 1e3:.2f} ms forward and backward; "
            f"one cat at the end takes {kept_fraction(result):.0%} of that (tried)",
            edit="append the pieces to a list and torch.cat (or torch.stack) once after the loop",
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def _growing_over_steps(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line whose cat has a longer first input in every step: a bank, a history, a cache."""
    cats = [
        i for i, o in enumerate(evidence.operators) if o.op == "aten.cat" and o.phase != "backward" and o.source >= 0
    ]
    for source, rows in group_by(cats, lambda i: evidence.operators[i].source).items():
        firsts = sorted({evidence.operators[i].inputs[0].num_elements for i in rows})
        pieces = {evidence.operators[i].inputs[-1].shape for i in rows}
        is_once_a_step = all(
            evidence.operators[i].num_calls < 1 for i in rows
        )  # another length in every step looked at
        if (
            not is_once_a_step
            or len(firsts) < 2
            or len(pieces) > 1
            or firsts[0] < 2 * evidence.operators[rows[0]].inputs[-1].num_elements
        ):
            continue
        sampled_s = sum(r.seconds for r in evidence.lines if r.source == source and r.process == "main")
        cost_s = max(seconds_of(evidence, rows), sampled_s)
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=(0.7 * cost_s, cost_s),
            because=f"torch.cat copies all that earlier steps gathered to append {'x'.join(map(str, pieces.pop()))}; "
            f"{cost_s * 1e3:.2f} ms of the mean step seen, and more with every step",
            edit="append to a list and torch.cat once at the end, or write into a tensor allocated for all steps",
            levers=RULE.levers,
            operators=tuple(rows),
        )


def _rows(evidence: Evidence, source: int) -> tuple[int, ...]:
    """The cat and its backward."""
    return tuple(
        i
        for i in rows_at(evidence, (source,))
        if evidence.operators[i].op == "aten.cat" or evidence.operators[i].phase == "backward"
    )


def _growing(evidence: Evidence) -> dict[int, list[int]]:
    """Source -> calls in the trace that append to the result of another call of the same line."""
    trace, operators = evidence.trace, evidence.operators
    cats = [
        c
        for c, row in enumerate(trace.operator)
        if operators[row].op == "aten.cat" and operators[row].phase != "backward"
    ]
    by_source = group_by(cats, lambda c: operators[trace.operator[c]].source)
    found = {}
    for source, calls in by_source.items():
        mine = set(calls)
        appended = [c for c in calls if trace.producers[c] and trace.producers[c][0] in mine]
        if source >= 0 and len(appended) >= _FEWEST:
            found[source] = appended
    return found


def _trial_of(evidence: Evidence, source: int, calls: list[int]) -> TimeGrowingCat:
    last = evidence.operators[evidence.trace.operator[calls[-1]]]
    piece, whole = last.inputs[-1], last.outputs[0]
    dim = next((d for d, (a, b) in enumerate(zip(piece.shape, whole.shape, strict=True)) if a != b), 0)
    count = max(2, whole.shape[dim] // max(1, piece.shape[dim]))
    backward = has_backward(evidence, _rows(evidence, source))
    return TimeGrowingCat(piece=piece.shape, dim=dim, count=count, dtype=piece.dtype, backward=backward)


RULE = Rule(
    id="bandwidth.growing-cat",
    title="A tensor grown piece by piece",
    module=__name__,
    check=check,
    propose=propose,
    levers=("memory.gather-once",),
)
