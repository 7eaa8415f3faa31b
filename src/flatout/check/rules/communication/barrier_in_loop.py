"""Every step has a barrier.

Costs        The barrier's own round trips; what it waits for slower ranks the next collective would wait for anyway.
Evidence     Calls of `barrier` in the steps, with their line, and their time beyond the wait for the last rank.
Levers       communication.drop-barrier
False alarm  A barrier around a checkpoint or an evaluation, once in many steps.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.accounting import group_by


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding per line with a barrier in every step."""
    for source, num, exposed_s, own_s in _barriers(evidence):
        yield Finding(
            where=evidence.source_of(source),
            cost_s=exposed_s,
            saved_s=(0.7 * own_s, own_s),
            because=f"{num:.0f} barrier(s) a step take {own_s * 1e3:.2f} ms beyond the wait for the last rank",
            edit="delete it: collectives order the ranks by themselves; keep a barrier only around files that ranks share",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line whose barrier costs too little to be reported."""
    for source, num, exposed_s, own_s in _barriers(evidence):
        yield Note(
            where=evidence.source_of(source),
            text=f"{num:.0f} barrier(s) a step; {exposed_s * 1e3:.2f} ms in them, {own_s * 1e3:.2f} ms beyond the wait for the "
            "last rank",
        )


def _barriers(evidence: Evidence) -> Iterator[tuple[int, float, float, float]]:
    """Barriers of a step: (line, calls, exposed seconds, seconds beyond the wait)."""
    barriers = [r for r in evidence.collectives if r.op in ("barrier", "monitored_barrier") and r.num >= 0.5]
    for source, calls in group_by(barriers, lambda r: r.source).items():
        yield source, sum(c.num for c in calls), sum(c.exposed_s for c in calls), sum(c.transfer_s for c in calls)


RULE = rule(__name__, check, note=note, title="A barrier in every step")
