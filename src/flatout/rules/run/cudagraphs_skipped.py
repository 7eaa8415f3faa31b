"""CUDA graphs were asked for and skipped.

Costs        Every kernel is launched by the host again, which mode='reduce-overhead' was meant to end.
Evidence     Inductor's own count of skipped graphs, with its reason.
Levers       graph.capture
False alarm  None known; what it costs cannot be measured without the graphs, so it is a note.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield nothing: what a graph would save is not measured."""
    yield from ()


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line."""
    for event in evidence.compilation.events if evidence.compilation is not None else ():
        if event.kind == "cudagraph-skip":
            yield Note(
                rule=RULE.id,
                where=evidence.source_of(event.source),
                text=f"{event.count} CUDA graph(s) were skipped, so every kernel is launched one by one: {event.reason}",
            )


RULE = Rule(
    id="run.cudagraphs-skipped",
    title="CUDA graphs were skipped",
    module=__name__,
    check=check,
    note=note,
    levers=("graph.capture",),
)
