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


_OVERWRITING: Final = frozenset(f"aten.{name}" for name in ("copy_", "fill_", "index_put_"))
"""In-place operators that do not need what was in the memory that they write to."""
_PARTS: Final = ("aten.select", "aten.slice")


def longest_dependence(trace: Trace, operators: Sequence[Operator], inside: set[int]) -> int:
    """Length of the longest chain, among the calls of these operators, in which each needs the result of the one before.

    Counted by how often the chain passes the same operator row, gathering operators left out: about the number of iterations
    for a recurrence, 1 for a loop over independent rows.
    """
    return max(dependences(trace, operators, inside), default=0)


def dependences(trace: Trace, operators: Sequence[Operator], inside: set[int]) -> list[int]:
    """Lengths of the longest such chain that leads to each call of the trace, itself included."""
    depth: dict[int, dict[tuple[str, int], int]] = {}
    longest = []
    writes = _PartWrites(trace, operators, inside)
    for call, row in enumerate(trace.operator):
        operator = operators[row]
        merged: dict[tuple[str, int], int] = {}
        for producer in writes.needed_by(call):
            for key, value in depth.get(producer, {}).items():
                merged[key] = max(value, merged.get(key, 0))
        if row in inside and operator.op not in _GATHERING:
            key = (operator.op, operator.source)
            merged[key] = merged.get(key, 0) + 1
        if merged:
            depth[call] = merged
        longest.append(max(merged.values(), default=0))
    return longest


class _PartWrites:
    """Tells apart the parts of a buffer that in-place operators write to, by the arguments of the select or slice before them.

    The trace knows who wrote to a buffer last, not to which part of it. Slices with other arguments are taken not to overlap.
    """

    def __init__(self, trace: Trace, operators: Sequence[Operator], inside: set[int]) -> None:
        self._trace, self._operators, self._inside = trace, operators, inside
        self._parts: dict[tuple[int, tuple[int, ...]], str] = {}
        """Arguments of the last select or slice inside the loop, by the buffer's last writer and the part's shape."""
        self._buffers: dict[int, int] = {}
        """The call that made the buffer to which a call wrote."""
        self._last_writes: dict[tuple[int, tuple[int, ...], str], int] = {}
        self._whole_writes: dict[int, int] = {}

    def needed_by(self, call: int) -> tuple[int, ...]:
        """The calls whose results this one needs. Called for each call of the trace in order."""
        operator, producers = self._operators[self._trace.operator[call]], self._trace.producers[call]
        if operator.op in _PARTS:
            self._note_part(call)
        if not producers or not _is_in_place(operator.op):
            return producers
        buffer = self._buffers[call] = self._buffers.get(producers[0], producers[0])
        shape = operator.inputs[0].shape if operator.inputs else ()
        part = self._parts.get((producers[0], shape))
        if part is None:
            self._whole_writes[buffer] = call
            return producers[1:] if operator.op in _OVERWRITING else producers
        before = self._whole_writes.get(buffer, buffer)
        if part:
            before = max(before, self._last_writes.get((buffer, shape, part), -1))
            self._last_writes[buffer, shape, part] = call
        return producers[1:] if operator.op in _OVERWRITING else (before, *producers[1:])

    def _note_part(self, call: int) -> None:
        row, producers = self._trace.operator[call], self._trace.producers[call]
        view = self._operators[row]
        is_part = bool(view.inputs) and view.outputs[0].num_elements < view.inputs[0].num_elements
        if row in self._inside and is_part:
            self._parts[producers[0], view.outputs[0].shape] = view.scalars


def _is_in_place(op: str) -> bool:
    """Whether an operator writes to its first input; lists of tensors (foreach) are left out."""
    return op.endswith("_") and not op.endswith("__") and not op.startswith("aten._foreach")


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
