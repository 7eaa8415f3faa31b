"""Tensors are put aside in every step and never let go.

Costs        Memory that grows until it is full.
Evidence     Tensors of a watched step that are alive some steps later, while all that Python holds has grown as fast; the
             garbage collector says which container holds them, its name which line fills it.
Levers       memory.bound-store
False alarm  A store that is emptied later than was watched (at the end of a long epoch); one that is small beside the peak is
             not reported.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.machine.cost.memory import grown

_SMALLEST_FRACTION = 1e-4
"""Of the peak and step: with less it takes ten thousand steps to double the memory, and most epochs end before."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that makes what is kept."""
    for memory, growth, num_bytes in grown(evidence, has_graph=False):
        if num_bytes < _SMALLEST_FRACTION * memory.peak_bytes:
            continue
        holder = f"the {growth.container}" if growth.container else "something that was not found"
        each = f"{growth.tensors_per_step:.0f} tensors" if growth.tensors_per_step > 1 else "a tensor"
        yield Finding(
            where=evidence.source_of(growth.holder) or evidence.source_of(growth.source),
            because=f"Each step leaves {each} behind ({num_bytes / 2**20:.2f} MiB), held by {holder}.",
            edit="bound it (collections.deque(maxlen=...)), or keep what is needed of it: a running sum, a smaller dtype",
            also=evidence.sources_of((growth.source,)),
            growth_bytes_per_step=num_bytes,
            device=memory.device,
        )


RULE = rule(__name__, check, title="Tensors pile up from step to step")
