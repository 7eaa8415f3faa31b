"""A backward keeps its graph, and nobody goes through it again.

Costs        The activations of one step live on through the forward of the next, so that both are held at once.
Evidence     backward(retain_graph=True) whose nodes no other backward of the step reached, while none reached back into earlier
             steps; the bytes are what the graph still held when the step ended, as far as it was alive at the peak.
Levers       memory.free-graph
False alarm  A second backward through the same graph (several losses of one forward): it is seen, and then nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.machine.cost.memory import bytes_at_peak


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that keeps a graph."""
    for memory in evidence.memory:
        graph_bytes = bytes_at_peak(memory, "kept")
        for retained in memory.retained:
            yield Finding(
                where=evidence.source_of(retained.source),
                because=f"The graph holds {retained.bytes / 2**20:.1f} MiB of activations after the step, and no second backward "
                f"uses them; they are let go only when the next forward is over.",
                edit="backward() without retain_graph=True",
                saved_bytes=min(retained.bytes, graph_bytes),
                device=memory.device,
            )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each, for those that cost little."""
    for memory in evidence.memory:
        for retained in memory.retained:
            yield Note(
                where=evidence.source_of(retained.source),
                text=f"retain_graph=True keeps {retained.bytes / 2**20:.2f} MiB for a second backward that never comes",
            )


RULE = rule(__name__, check, note=note, title="A graph is retained for nobody")
