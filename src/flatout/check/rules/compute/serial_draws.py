"""Dropout's random numbers are drawn one after the other.

Costs        On a CPU without MKL's generator (any but Intel's) a mask takes some 15 ns an element, on one core whatever the
             number of threads: more than most layers that it follows.
Evidence     Operators that fill large tensors on the CPU with `bernoulli_`. Trial: the same numbers by vector instructions.
Levers       parallelism.vectorised-draws
False alarm  Dropout that is on by mistake: switching it off is cheaper still.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeDraws
from flatout.machine.cost.accounting import group_by, milliseconds, operator_seconds
from flatout.machine.cost.suspects import SuspectRows, proposing, tried

_DRAWS: Final = "aten.bernoulli_"
_FEWEST: Final = 2000
"""Elements of a mask: smaller ones are left as they are (see `vectorise_draws`)."""
_WORTH_A_TRIAL: Final = 0.03
_WORTH_SAYING: Final = 0.8
"""The largest share of the time that the cure may leave: with MKL's generator it leaves nearly all."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all masks, since one change makes all of them faster; at the line that draws longest."""
    items = [item for item in tried(evidence, _suspects) if item.remaining < _WORTH_SAYING]
    if not items:
        return
    cost_s, saved_s = sum(item.cost_s for item in items), sum(item.saved_s for item in items)
    largest = max(items, key=lambda item: item.cost_s)
    rows = tuple(row for item in items for row in item.suspect.rows)
    lines = group_by(rows, lambda row: evidence.operators[row].source)
    first, *others = sorted(lines, key=lambda line: -operator_seconds(evidence, tuple(lines[line])))
    yield Finding(
        where=evidence.source_of(first),
        cost_s=cost_s,
        saved_s=(0.8 * saved_s, saved_s),
        because=f"the masks of dropout take {milliseconds(cost_s)} of the step, one element after the other; the same numbers by "
        f"vector instructions take {largest.remaining:.0%} of that (tried)",
        edit="flatout.vectorise_draws() once at the start",
        also=tuple(place for line in others if (place := evidence.source_of(line)) is not None),
        operators=rows,
        basis="trial",
    )


def _suspects(evidence: Evidence) -> Iterator[SuspectRows[TimeDraws]]:
    """Masks of one type and order of magnitude: what an element costs is the same for all of them."""
    if evidence.workload.device != "cpu":
        return
    operators = evidence.operators
    rows = [i for i, o in enumerate(operators) if o.op == _DRAWS and o.outputs and o.outputs[0].num_elements >= _FEWEST]
    for dtype, same in group_by(rows, lambda row: operators[row].outputs[0].dtype).items():
        longest = max(same, key=lambda row: operator_seconds(evidence, (row,)))
        yield SuspectRows(tuple(same), TimeDraws(num_elements=operators[longest].outputs[0].num_elements, dtype=dtype))


RULE = rule(
    __name__,
    check,
    propose=proposing(_suspects, worth=_WORTH_A_TRIAL),
    title="Random numbers drawn one by one",
)
