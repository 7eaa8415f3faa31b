"""Every step has a barrier.

Costs        The barrier's own round trips; what it waits for slower ranks the next collective would wait for anyway.
Evidence     Calls of `barrier` in the steps, with their line, and their time beyond the wait for the last rank.
Levers       communication.drop-barrier
False alarm  A barrier around a checkpoint or an evaluation, once in many steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import group_by
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding per line with a barrier in every step."""
    for source, num, exposed_s, own_s in _barriers(evidence):
        yield Finding(
            rule=RULE.id,
            regime="communication",
            where=evidence.source_of(source),
            cost_s=exposed_s,
            saved_s=(0.7 * own_s, own_s),
            because=f"{num:.0f} barrier(s) a step take {own_s * 1e3:.2f} ms beyond the wait for the last rank",
            edit="delete it: collectives order the ranks by themselves; keep a barrier only around files that ranks share",
            levers=RULE.levers,
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line whose barrier costs too little to be reported."""
    for source, num, exposed_s, own_s in _barriers(evidence):
        yield Note(
            rule=RULE.id,
            where=evidence.source_of(source),
            text=f"{num:.0f} barrier(s) a step; {exposed_s * 1e3:.2f} ms in them, {own_s * 1e3:.2f} ms beyond the wait for the "
            "last rank",
        )


def _barriers(evidence: Evidence) -> Iterator[tuple[int, float, float, float]]:
    """(line, calls, exposed seconds, seconds beyond the wait) of a step."""
    rows = evidence.distributed.collectives if evidence.distributed is not None else ()
    barriers = [r for r in rows if r.op in ("barrier", "monitored_barrier") and r.num >= 0.5]
    for source, calls in group_by(barriers, lambda r: r.source).items():
        yield source, sum(c.num for c in calls), sum(c.exposed_s for c in calls), sum(c.transfer_s for c in calls)


RULE = Rule(
    id="communication.barrier-in-loop",
    title="A barrier in every step",
    module=__name__,
    check=check,
    note=note,
    levers=("communication.drop-barrier",),
)
