"""Sums over Memory records that several rules need."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from flatout.core.records.evidence import Evidence
from flatout.core.records.memory import Growth, Memory, MemoryKind


def bytes_at_peak(memory: Memory, kind: MemoryKind) -> int:
    """Bytes of one kind alive at the peak."""
    return sum(p.bytes for p in memory.at_peak if p.kind == kind)


def room(memory: Memory) -> int | None:
    """Bytes between the peak and the end of the memory; None where the end is not known."""
    if memory.total_bytes is None:
        return None
    used_bytes = max(memory.peak_bytes, memory.measured_peak_bytes or 0, memory.reserved_bytes or 0)
    return max(0, memory.total_bytes - used_bytes)


def main_memory(evidence: Evidence) -> Memory | None:
    """The memory of the device that computes: the one with most at its peak among devices, else the host's."""
    devices = [m for m in evidence.memory if m.device != "cpu"] or list(evidence.memory)
    return max(devices, key=lambda m: m.peak_bytes, default=None)


def grown(evidence: Evidence, *, has_graph: bool) -> Iterator[tuple[Memory, Growth, int]]:
    """What grows, with or without graphs: where, what, and bytes a step.

    Where one thing alone grows and the slope of the memory was measured, that is the figure if it is the larger one: graph nodes
    and their neighbours are not counted tensor by tensor.
    """
    for memory in evidence.memory:
        for growth in memory.growth:
            if growth.has_graph == has_graph:
                is_alone = len(memory.growth) == 1
                slope = round(memory.growth_bytes_per_step) if is_alone else 0
                yield memory, growth, max(growth.bytes_per_step, slope)


def num_elements_of(example: str) -> int:
    """Elements of 'float32[8, 1024, 50257]'; 0 for other text.

    >>> num_elements_of("float32[8, 4]"), num_elements_of("")
    (32, 0)
    """
    inside = example.partition("[")[2].rstrip("]")
    try:
        return prod(int(size) for size in inside.split(",")) if inside else 0
    except ValueError:
        return 0
