"""Reading the order of a deep step: who made whose input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flatout.core.records.evidence import Operator, Trace

_GATHERING_NAMES: Final = """
add add_ cat stack copy_ fill_ index_put_ index_put select slice view _unsafe_view reshape expand t transpose
permute unsqueeze squeeze detach alias maximum minimum zeros ones zero_ lift_fresh clone _to_copy index
select_scatter
"""
_GATHERING: Final = frozenset(f"aten.{name}" for name in _GATHERING_NAMES.split())
"""Operators that collect results or move data: a chain of only these does not make iterations depend on one another."""


def longest_dependence(trace: Trace, operators: Sequence[Operator], inside: set[int]) -> int:
    """Length of the longest chain, among the calls of these operators, in which each needs the result of the one before.

    Counted by how often the chain passes the same operator row, gathering operators left out: about the number of iterations
    for a recurrence, 1 for a loop over independent rows.
    """
    depth: dict[int, dict[tuple[str, int], int]] = {}
    longest = 0
    for call, row in enumerate(trace.operator):
        operator = operators[row]
        merged: dict[tuple[str, int], int] = {}
        producers = trace.producers[call]
        if operator.op in ("aten.copy_", "aten.fill_", "aten.index_put_"):
            producers = producers[1:]  # writing into a buffer does not need what was in it
        for producer in producers:
            for key, value in depth.get(producer, {}).items():
                merged[key] = max(value, merged.get(key, 0))
        if row in inside and operator.op not in _GATHERING:
            key = (operator.op, operator.source)
            merged[key] = merged.get(key, 0) + 1
            longest = max(longest, merged[key])
        if merged:
            depth[call] = merged
    return longest


def consumers(trace: Trace) -> dict[int, list[int]]:
    """The calls that read what a call wrote, by call."""
    readers: dict[int, list[int]] = {}
    for call, producers in enumerate(trace.producers):
        for producer in producers:
            if producer >= 0:
                readers.setdefault(producer, []).append(call)
    return readers


def walk_back(
    trace: Trace, operators: Sequence[Operator], start: int, through: frozenset[str], limit: int = 24
) -> Iterator[int]:
    """The calls that lead to `start`, nearest first, passing only through the named operators; the first other is included."""
    frontier, visited = [start], {start}
    while frontier and limit:
        limit -= 1
        call = frontier.pop(0)
        for producer in trace.producers[call]:
            if producer >= 0 and producer not in visited:
                visited.add(producer)
                yield producer
                if operators[trace.operator[producer]].op in through:
                    frontier.append(producer)


def walk_forward(
    readers: dict[int, list[int]],
    trace: Trace,
    operators: Sequence[Operator],
    start: int,
    through: frozenset[str],
    limit: int = 24,
) -> Iterator[int]:
    """The calls that follow from `start`, nearest first, through the named operators; the first other is included."""
    frontier, visited = [start], {start}
    while frontier and limit:
        limit -= 1
        for reader in readers.get(frontier.pop(0), ()):
            if reader not in visited:
                visited.add(reader)
                yield reader
                if operators[trace.operator[reader]].op in through:
                    frontier.append(reader)
