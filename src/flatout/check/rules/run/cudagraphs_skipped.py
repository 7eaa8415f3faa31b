"""CUDA graphs were asked for and skipped.

Costs        Every kernel is launched by the host again, which mode='reduce-overhead' was meant to end.
Evidence     Inductor's own count of skipped graphs, with its reason.
Levers       graph.capture
False alarm  None known; what it costs cannot be measured without the graphs, so it is a note.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Note


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note per line."""
    for event in evidence.compile_events("cudagraph-skip"):
        yield Note(
            where=evidence.source_of(event.source),
            text=f"{event.count} CUDA graph(s) were skipped, so every kernel is launched one by one: {event.reason}",
        )


RULE = rule(__name__, note=note, title="CUDA graphs were skipped")
