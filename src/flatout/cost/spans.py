"""How long a pipeline's table takes, many times over with other seconds: its order is worked out once, then times are added."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from flatout.cost.schedules import Action, Entry, Table, actions_of, played, table_of
from flatout.records.scale import ScheduleKind

Seconds = Mapping[tuple[str, int], float]
"""Of an action, by its kind and chunk."""


class _Step(NamedTuple):
    """An action in an order in which all that it needs comes before it. `together`: the next step begins where this one ends and
    what both send leaves after the second; `needed` are slots of what must have ended, -1 for none."""

    stage: int
    key: tuple[str, int]
    slot: int
    needed: int
    is_sent: bool
    other: _Step | None


_NONE: Final = 0
"""The slot that has always ended."""


def table_span_s(
    kind: ScheduleKind, seconds: Seconds, *, stages: int, micro_batches: int, chunks: int = 1, send_s: float = 0.0
) -> float:
    """What `span_s(played(table_of(...)))` gives; a table is ordered once and kept.

    Raises PlanError as `table_of` does.

    >>> table_span_s("1f1b", {("F", 0): 1.0, ("B", 0): 2.0, ("F", 1): 1.0, ("B", 1): 2.0}, stages=2, micro_batches=3)
    12.0
    """
    steps, num_slots = _ordered(kind, stages, micro_batches, chunks)
    clock, ended = [0.0] * stages, [0.0] * num_slots
    for stage, key, slot, needed, is_sent, other in steps:
        arrived = ended[needed] + send_s if is_sent else ended[needed]
        begin = clock[stage]
        if arrived > begin:
            begin = arrived
        end = begin + seconds[key]
        if other is not None:
            arrived = ended[other.needed] + (send_s if other.is_sent else 0.0)
            end = max(end, arrived + seconds[key]) + seconds[other.key]
            ended[other.slot] = end
        clock[stage] = ended[slot] = end
    return max(clock)


@lru_cache(maxsize=256)
def cached_table(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int) -> Table:
    """As `table_of`."""
    return table_of(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)


@lru_cache(maxsize=256)
def _ordered(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int) -> tuple[tuple[_Step, ...], int]:
    """Played with a second each, which gives an order; raises PlanError where there is none."""
    table = cached_table(kind, stages, micro_batches, chunks)
    last = max(action.chunk for row in table for entry in row for action in actions_of(entry))
    parts = (last + 1) // stages
    begun = {d.action: d.begin_s for row in played(table, seconds=lambda _: 1.0, chunks=parts) for d in row}
    home = {action.chunk: stage for stage, row in enumerate(table) for entry in row for action in actions_of(entry)}
    rows = [(begun[actions_of(entry)[0]], stage, entry) for stage, row in enumerate(table) for entry in row]
    rows.sort(key=lambda row: row[:2])
    slots = _Slots(last, micro_batches, home)
    return tuple(slots.step(stage, entry) for _, stage, entry in rows), slots.num


class _Slots:
    """Where the end of each forward and of each backward is kept."""

    def __init__(self, last: int, micro_batches: int, home: Mapping[int, int]) -> None:
        self._last, self._micro_batches, self._home = last, micro_batches, home
        self.num = 2 * (last + 1) * micro_batches + 2

    def step(self, stage: int, entry: Entry) -> _Step:
        """With its second action inside, where two are overlapped."""
        actions = actions_of(entry)
        first, *others = (self._of(stage, action) for action in actions)
        return first._replace(other=others[0]) if others else first

    def _of(self, stage: int, action: Action) -> _Step:
        kind, chunk, micro_batch = action
        own = self._slot(kind != "F", chunk, micro_batch)
        if kind == "F":
            before = self._slot(False, chunk - 1, micro_batch) if chunk else _NONE
            is_sent = bool(chunk) and self._home[chunk - 1] != stage
        elif kind == "W":  # it follows its own I on the same stage, and nobody waits for it
            return _Step(stage, (kind, chunk), self.num - 1, _NONE, False, None)
        else:
            before = self._slot(chunk < self._last, chunk if chunk == self._last else chunk + 1, micro_batch)
            is_sent = chunk < self._last and self._home[chunk + 1] != stage
        return _Step(stage, (kind, chunk), own, before, is_sent, None)

    def _slot(self, is_backward: bool, chunk: int, micro_batch: int) -> int:
        return 1 + (is_backward * (self._last + 1) + chunk) * self._micro_batches + micro_batch
