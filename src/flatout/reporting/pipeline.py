"""A pipeline's step in text: a line a stage, a letter a slice of time, and what of it is bubble."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from flatout.cost.schedules import Done
from flatout.reporting import units

KINDS: Final = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
"""What a stage does, by the letter of the schedule."""
MOST_STAGES: Final = 16
"""Stages that are shown of a longer pipeline: the first and the last of them."""
_WIDTH: Final = 80
_CUT: Final = " ~~ "


class Stretch(NamedTuple):
    """A part of the step that is shown."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.begin_s


class Idle(NamedTuple):
    """Bubble: of each stage its seconds, the pipeline's length, and what the bubble is of all stages' time."""

    of_stages_s: tuple[float, ...]
    span_s: float
    share: float

    @property
    def busiest(self) -> int:
        """The stage that waits the least; the first of those that do but for rounding."""
        return min(range(len(self.of_stages_s)), key=lambda stage: round(self.share_of(stage), 9))

    def share_of(self, stage: int) -> float:
        """Of one stage's time."""
        return self.of_stages_s[stage] / self.span_s


def idle_of(rows: Sequence[Sequence[Done]]) -> Idle:
    """The bubble of a schedule that was played, from its first beginning to its last end.

    `rows` are what `flatout.cost.schedules.played` gives: of each stage, in order.

    >>> from flatout.cost.schedules import played, table_of
    >>> rows = played(table_of("gpipe", stages=4, micro_batches=6), seconds=lambda _: 1.0)
    >>> round(idle_of(rows).share, 4)  # (stages - 1) / (micro-batches + stages - 1)
    0.3333
    """
    whole = whole_of(rows)
    free = tuple(whole.length_s - sum(done.end_s - done.begin_s for done in row) for row in rows)
    return Idle(free, whole.length_s, sum(free) / (len(rows) * whole.length_s))


def whole_of(rows: Sequence[Sequence[Done]]) -> Stretch:
    """From the first beginning to the last end of all stages."""
    return Stretch(min(row[0].begin_s for row in rows if row), max(row[-1].end_s for row in rows if row))


def stretches(rows: Sequence[Sequence[Done]], *, whole_s: float, ends_s: float) -> tuple[Stretch, ...]:
    """The step as a whole, or where it is longer than `whole_s` its beginning and its end, which take `ends_s` together."""
    whole = whole_of(rows)
    if whole.length_s <= whole_s:
        return (whole,)
    return (
        Stretch(whole.begin_s, whole.begin_s + ends_s / 2),
        Stretch(whole.end_s - ends_s / 2, whole.end_s),
    )


def shortest_s(rows: Sequence[Sequence[Done]]) -> float:
    """The mean length of the kind of action whose mean is the shortest."""
    lengths: dict[str, list[float]] = {}
    for row in rows:
        for done in row:
            lengths.setdefault(done.action.kind, []).append(done.end_s - done.begin_s)
    return min(sum(all_s) / len(all_s) for all_s in lengths.values())


def shown(num: int, *, most: int = MOST_STAGES, besides: int = 0) -> tuple[int, ...]:
    """The first and the last of `num` stages, `most` of them, and the one that is named `besides`.

    >>> shown(3), shown(64, most=4), shown(64, most=4, besides=9)
    ((0, 1, 2), (0, 1, 62, 63), (0, 1, 9, 62, 63))
    """
    if num <= most:
        return tuple(range(num))
    half = most // 2
    return tuple(sorted({*range(half), besides, *range(num - half, num)}))


def kinds_of(rows: Sequence[Sequence[Done]]) -> list[str]:
    """The letters that the schedule has, in the order of KINDS."""
    found: set[str] = {done.action.kind for row in rows for done in row}
    return [*(kind for kind in KINDS if kind in found), *sorted(found - set(KINDS))]


def timeline_lines(rows: Sequence[Sequence[Done]]) -> Iterator[str]:
    """The timeline, at most 100 columns wide; a letter is large where an action begins and small where it goes on.

    A step with more actions than letters is cut in its middle, and a pipeline of more than MOST_STAGES stages too.
    """
    idle = idle_of(rows)
    least_s = shortest_s(rows)
    slice_s = least_s / max(1, int(_WIDTH * least_s / idle.span_s))
    parts = stretches(rows, whole_s=_WIDTH * slice_s, ends_s=(_WIDTH - len(_CUT)) * slice_s)
    said = ", ".join(f"{kind} {KINDS.get(kind, kind)}" for kind in kinds_of(rows))
    yield f"pipeline of {len(rows)} stages, {units.duration(idle.span_s)} in all, {units.duration(slice_s)} a letter"
    yield f"{said}, . bubble"
    before = -1
    for stage in shown(len(rows)):
        if stage != before + 1:
            yield f"{'...':9}{stage - before - 1} stages between"
        line = _CUT.join(_letters(rows[stage], part, slice_s) for part in parts)
        yield f"{f'stage {stage}':9}{line} {units.percent(idle.share_of(stage)):>6}"
        before = stage
    yield (
        f"bubble: {units.percent(idle.share)} of all stages' time; stage {idle.busiest}, the busiest, waits "
        f"{units.duration(idle.of_stages_s[idle.busiest])}"
    )
    if len(parts) > 1:
        yield f"~~ stands for {units.duration(parts[1].begin_s - parts[0].end_s)} in the middle"


def _letters(row: Sequence[Done], part: Stretch, slice_s: float) -> str:
    """Of one stage; ends of actions are rounded to slices, so that no two of them share one."""
    letters = ["."] * round(part.length_s / slice_s)
    for done in row:
        if done.end_s <= part.begin_s or done.begin_s >= part.end_s:
            continue
        first, last = (round((at_s - part.begin_s) / slice_s) for at_s in (done.begin_s, done.end_s))
        for at in range(max(first, 0), min(last, len(letters))):
            letters[at] = done.action.kind if at == first else done.action.kind.lower()
    return "".join(letters)
