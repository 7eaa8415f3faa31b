"""How long a pipeline's table takes, many times over with other seconds: its order is worked out once, then times are added."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from flatout.core.records.scale import ScheduleKind
from flatout.machine.cost.schedules import (
    Action,
    actions_of,
    ended_action,
    needed_action,
    schedule_table,
    simulated_schedule,
)

_ROUNDS = (8, 10)
"""Rounds of as many micro-batches as there are stages, after which a table repeats itself."""

Seconds = Mapping[tuple[str, int], float]
"""Seconds of an action, by its kind and chunk."""


class _OrderedAction(NamedTuple):
    """An action in an order in which all that it needs comes before it. `together`: the next step begins where this one ends and
    what both send leaves after the second; `needed` is the index of the end that it waits for."""

    stage: int
    key: tuple[str, int]
    end_index: int
    needed: int
    is_sent: bool
    other: _OrderedAction | None


def table_span_s(
    kind: ScheduleKind, seconds: Seconds, *, stages: int, micro_batches: int, chunks: int = 1, send_s: float = 0.0
) -> float:
    """What `span_s(simulated_schedule(schedule_table(...)))` gives; a table is ordered once and cached.

    Of many micro-batches the middle repeats itself, every `stages` of them: what comes after the first rounds takes as long as
    the last of these.

    Raises PlanError as `schedule_table` does.

    >>> table_span_s("1f1b", {("F", 0): 1.0, ("B", 0): 2.0, ("F", 1): 1.0, ("B", 1): 2.0}, stages=2, micro_batches=3)
    12.0
    """
    rest = micro_batches % stages
    first, second = ((rounds * stages + rest) for rounds in _ROUNDS)
    if micro_batches > second and not (rest and kind in ("interleaved", "zero-bubble")):
        shorter_s, longer_s = (_span_s(kind, seconds, stages, number, chunks, send_s) for number in (first, second))
        return longer_s + (micro_batches - second) * (longer_s - shorter_s) / (second - first)
    return _span_s(kind, seconds, stages, micro_batches, chunks, send_s)


def _span_s(kind: ScheduleKind, seconds: Seconds, stages: int, micro_batches: int, chunks: int, send_s: float) -> float:
    steps, num_ends = _ordered(kind, stages, micro_batches, chunks)
    clock, ended = [0.0] * stages, [0.0] * num_ends
    for stage, key, end_index, needed, is_sent, other in steps:
        arrived = ended[needed] + send_s if is_sent else ended[needed]
        begin = clock[stage]
        if arrived > begin:
            begin = arrived
        end = begin + seconds[key]
        if other is not None:
            arrived = ended[other.needed] + (send_s if other.is_sent else 0.0)
            end = max(end, arrived + seconds[key]) + seconds[other.key]
            ended[other.end_index] = end
        clock[stage] = ended[end_index] = end
    return max(clock)


@lru_cache(maxsize=256)
def _ordered(
    kind: ScheduleKind, stages: int, micro_batches: int, chunks: int
) -> tuple[tuple[_OrderedAction, ...], int]:
    """Played with a second each, which gives an order; raises PlanError where there is none."""
    table = schedule_table(kind, stages=stages, micro_batches=micro_batches, chunks=chunks)
    last = max(action.chunk for row in table for entry in row for action in actions_of(entry))
    parts = (last + 1) // stages
    begun = {d.action: d.begin_s for row in simulated_schedule(table, seconds=lambda _: 1.0, chunks=parts) for d in row}
    home = {action.chunk: stage for stage, row in enumerate(table) for entry in row for action in actions_of(entry)}
    rows = [(begun[actions_of(entry)[0]], stage, entry) for stage, row in enumerate(table) for entry in row]
    rows.sort(key=lambda row: row[:2])
    indices: dict[Action | None, int] = {None: 0}  # an end that lies before everything

    def step(stage: int, action: Action, *others: Action) -> _OrderedAction:
        needed = needed_action(action, last)
        return _OrderedAction(
            stage,
            (action.kind, action.chunk),
            end_index=indices.setdefault(ended_action(action), len(indices)),
            needed=indices.setdefault(needed, len(indices)),
            is_sent=needed is not None and home[needed.chunk] != stage,
            other=step(stage, *others) if others else None,
        )

    return tuple(step(stage, *actions_of(entry)) for _, stage, entry in rows), len(indices)
