"""The same code is compiled again and again in the midst of the steps.

Costs        Seconds for every new version: a check of it failed, since a size, a number or an object is never the same twice.
Evidence     dynamo's record of recompilations with the line and the check that failed, still going on in the later half of the
             steps, and the seconds they took.
Levers       graph.dynamic-shapes
False alarm  The few versions every program makes at its start (the last short batch, evaluation); then it is a note at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note

_FEWEST: Final = 3
_LATE: Final = 0.5


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for all recompilations of the run, at the line that took longest."""
    events = [e for e in evidence.compile_events("recompile") if e.last_step >= _LATE * evidence.steps.num_observed]
    compile_s = evidence.steps.phases.get("compile", 0.0)
    if sum(e.in_steps for e in events) < _FEWEST or not compile_s:
        return
    first = max(events, key=lambda e: e.seconds)
    cost_s = min(compile_s, evidence.steps.whole_s)
    yield Finding(
        where=evidence.source_of(first.source),
        cost_s=cost_s,
        saved_s=(0.8 * cost_s, cost_s),
        because=f"compiled {sum(e.count for e in events)} times anew, {sum(e.in_steps for e in events)} times in "
        f"{evidence.steps.num_timed} timed steps, {compile_s * 1e3:.1f} ms of each step on average; the check that failed: "
        f"{first.reason}",
        edit="torch.compile(..., dynamic=True) or torch._dynamo.mark_dynamic for sizes that change, sizes rounded up to a few, a "
        "tensor for a number that changes",
        also=evidence.sources_of(e.source for e in events),
        phases=("compile",),
        basis="timed",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where compiling went on into the timed steps and ended."""
    for event in evidence.compile_events("recompile"):
        if event.in_steps and not evidence.steps.phases.get("compile", 0.0):
            yield Note(
                where=evidence.source_of(event.source),
                text=f"compiled {event.count} times anew ({event.seconds:.1f} s), last in step {event.last_step} of "
                f"{evidence.steps.num_observed}; the check that failed: {event.reason}",
            )


RULE = rule(__name__, check, note=note, title="Compiled again and again")
