"""Results kept from step to step hold the graphs that made them.

Costs        Memory that grows with every step: each kept tensor keeps its whole graph, and where no backward freed them, all
             activations too.
Evidence     Graph nodes of a watched step that living tensors still reach three steps later, as they do those of the steps
             between; the garbage collector says who holds the tensors, the slope of the memory how much it is.
Levers       memory.detach-history
False alarm  A graph that a later backward goes through (backpropagation through several steps): it ends there.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.memory import Growth
from flatout.machine.cost.memory import grown


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per holder of graphs."""
    for memory, growth, num_bytes in grown(evidence, has_graph=True):
        yield Finding(
            where=evidence.source_of(growth.holder if growth.holder >= 0 else growth.source),
            because=_because(growth),
            edit="keep the number, not the tensor: .item(), or .detach() where a tensor is needed, before storing or adding up",
            growth_bytes_per_step=num_bytes,
            device=memory.device,
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each, for those that grow too slowly to matter within a day."""
    for _, growth, num_bytes in grown(evidence, has_graph=True):
        where = evidence.source_of(growth.holder if growth.holder >= 0 else growth.source)
        yield Note(
            where=where,
            text=f"{_because(growth)} About {num_bytes / 1024:.1f} KiB more each step; detach it before it is kept.",
        )


def _because(growth: Growth) -> str:
    holder = f"The {growth.container}" if growth.container else "Something that was not found"
    return f"{holder} keeps the graphs of earlier steps alive."


RULE = rule(__name__, check, note=note, title="A history keeps the graph of every step")
