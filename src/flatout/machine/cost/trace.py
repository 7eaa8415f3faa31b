"""Reading the order of a deep step: who made whose input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
    return _walk(lambda call: trace.producers[call], trace, operators, start, through, limit)


def walk_forward(
    readers: dict[int, list[int]], trace: Trace, operators: Sequence[Operator], start: int, through: frozenset[str]
) -> Iterator[int]:
    """The calls that follow from `start`, nearest first, through the named operators; the first other is included."""
    return _walk(lambda call: readers.get(call, ()), trace, operators, start, through, 24)


def _walk(
    neighbours: Callable[[int], Iterable[int]],
    trace: Trace,
    operators: Sequence[Operator],
    start: int,
    through: frozenset[str],
    limit: int,
) -> Iterator[int]:
    frontier, visited = [start], {-1, start}  # -1 stands for what no call of the step made
    while frontier and limit:
        limit -= 1
        for call in neighbours(frontier.pop(0)):
            if call not in visited:
                visited.add(call)
                yield call
                if operators[trace.operator[call]].op in through:
                    frontier.append(call)
