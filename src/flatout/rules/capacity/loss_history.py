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

from flatout.cost.memory import grown
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule
from flatout.records.memory import Growth


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per holder of graphs."""
    for memory, growth, num_bytes in grown(evidence, has_graph=True):
        yield Finding(
            rule=RULE.id,
            regime="capacity",
            where=evidence.source_of(growth.holder if growth.holder >= 0 else growth.source),
            cost_s=0.0,
            saved_s=(0.0, 0.0),
            because=_because(growth),
            edit="keep the number, not the tensor: .item(), or .detach() where a tensor is needed, before storing or adding up",
            levers=RULE.levers,
            growth_bytes_per_step=num_bytes,
            device=memory.device,
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each, for those that grow too slowly to matter within a day."""
    for _, growth, num_bytes in grown(evidence, has_graph=True):
        where = evidence.source_of(growth.holder if growth.holder >= 0 else growth.source)
        yield Note(
            rule=RULE.id,
            where=where,
            text=f"{_because(growth)} About {num_bytes / 1024:.1f} KiB more each step; detach it before it is kept.",
        )


def _because(growth: Growth) -> str:
    holder = f"The {growth.container}" if growth.container else "Something that was not found"
    return f"{holder} keeps the graphs of earlier steps alive."


RULE = Rule(
    id="capacity.loss-history",
    title="A history keeps the graph of every step",
    module=__name__,
    check=check,
    note=note,
    levers=("memory.detach-history",),
)
