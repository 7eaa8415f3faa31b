"""Pipeline schedules as tables of what each stage does, one after the other, and when each of it is done.

GPipe (Huang et al., 2019), 1F1B (Narayanan et al., PipeDream-2BW and Megatron-LM, 2021) and its interleaved form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from flatout.errors import PlanError
from flatout.records.scale import ScheduleKind


class Action(NamedTuple):
    """A forward or a backward of one micro-batch through one chunk of the model; chunk c lies on stage c modulo their number."""

    kind: Literal["F", "B"]
    chunk: int
    micro_batch: int


Table = tuple[tuple[Action, ...], ...]
"""By stage, in order."""


class Done(NamedTuple):
    """An action and when it began and ended."""

    action: Action
    begin_s: float
    end_s: float


def table_of(kind: ScheduleKind, *, stages: int, micro_batches: int, chunks: int = 1) -> Table:
    """What each stage does.

    Raises PlanError for an interleaved schedule whose micro-batches are no multiple of the stages.

    >>> ["".join(f"{a.kind}{a.micro_batch}" for a in row) for row in table_of("1f1b", stages=2, micro_batches=3)]
    ['F0F1B0F2B1B2', 'F0B0F1B1F2B2']
    """
    if kind == "interleaved" and chunks > 1:
        if micro_batches % stages:
            raise PlanError(
                f"{micro_batches} micro-batches are no multiple of {stages} stages: interleaved schedules need that"
            )
        return tuple(_interleaved(stage, stages, micro_batches, chunks) for stage in range(stages))
    return tuple(_plain(kind, stage, stages, micro_batches) for stage in range(stages))


def _plain(kind: ScheduleKind, stage: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    warm = micro_batches if kind == "gpipe" else min(stages - stage - 1, micro_batches)
    actions = [Action("F", stage, i) for i in range(warm)]
    for i in range(micro_batches - warm):
        actions += [Action("F", stage, warm + i), Action("B", stage, i)]
    return (*actions, *(Action("B", stage, i) for i in range(micro_batches - warm, micro_batches)))


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
    """Groups of as many micro-batches as stages go through all chunks of a stage in turn (Narayanan et al., 2021, figure 4)."""
    total = micro_batches * chunks

    def forward(step: int) -> Action:
        group, inside = divmod(step, stages * chunks)
        return Action("F", inside // stages * stages + stage, group * stages + inside % stages)

    def backward(step: int) -> Action:
        group, inside = divmod(step, stages * chunks)
        chunk = chunks - 1 - inside // stages
        return Action("B", chunk * stages + stage, group * stages + inside % stages)

    warm = min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages)
    actions = [forward(i) for i in range(warm)]
    for i in range(total - warm):
        actions += [forward(warm + i), backward(i)]
    return (*actions, *(backward(i) for i in range(total - warm, total)))


def played(
    table: Table, *, seconds: Callable[[Action], float], send_s: float = 0.0, chunks: int = 1
) -> tuple[tuple[Done, ...], ...]:
    """When each action of each stage begins and ends: it waits for its stage, and for what the neighbouring chunk sends.

    Raises PlanError for a table in which stages wait for each other for ever.
    """
    last = len(table) * chunks - 1
    ended: dict[Action, float] = {}
    rows: list[list[Done]] = [[] for _ in table]
    clock = [0.0] * len(table)
    left = sum(map(len, table))
    while left:
        before = left
        for stage, row in enumerate(table):
            while len(rows[stage]) < len(row):
                action = row[len(rows[stage])]
                needed = _needed(action, last)
                if needed is not None and needed not in ended:
                    break
                arrived = 0.0 if needed is None else ended[needed] + (send_s if needed.chunk != action.chunk else 0.0)
                begin = max(clock[stage], arrived)
                clock[stage] = ended[action] = begin + seconds(action)
                rows[stage].append(Done(action, begin, clock[stage]))
                left -= 1
        if left == before:
            raise PlanError("the stages of this schedule wait for each other for ever")
    return tuple(map(tuple, rows))


def _needed(action: Action, last: int) -> Action | None:
    """What must have ended before it."""
    if action.kind == "F":
        return action._replace(chunk=action.chunk - 1) if action.chunk else None
    return action._replace(kind="F") if action.chunk == last else action._replace(chunk=action.chunk + 1)


def span_s(rows: Sequence[Sequence[Done]]) -> float:
    """From the first beginning to the last end."""
    return max(row[-1].end_s for row in rows)
