"""A pipeline's step on a time axis: a row a stage, a box for each forward and backward, and the bubble hatched.

There may be a thousand boxes, so they are written as plain rectangles with a class each, and not drawn by matplotlib.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from statistics import fmean
from typing import Final, NamedTuple

from markupsafe import Markup

from flatout.core import units
from flatout.machine.cost.schedules import Done
from flatout.report.html.figure import WIDTH_PX, letters_px

KINDS: Final = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
"""What a stage does, by the letter of the schedule."""
MOST_STAGES: Final = 16
"""Stages that are shown of a longer pipeline: the first and the last of them."""
_LEFT_PX: Final = 84
_RIGHT_PX: Final = 66
_TOP_PX: Final = 20
_ROW_PX: Final = 26
_GAP_PX: Final = 4
_AXIS_PX: Final = 30
_CUT_PX: Final = 44
"""What stands for the middle of a step that is cut."""
_LEAST_PX: Final = 5.0
"""No action is narrower, in the mean of the shortest kind: a step with more of them is cut in its middle."""
_CUT_BOX_PX: Final = 8.0
"""How wide that is then."""
_LETTER_PX: Final = 10
_STYLES: Final = {"F": "forward", "B": "backward", "I": "compile", "W": "data"}
"""The colour of each kind, by its name in the page's style."""


class Stretch(NamedTuple):
    """A part of the step that is shown."""

    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Length of the part in seconds."""
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
        """The fraction of one stage's time that is bubble."""
        return self.of_stages_s[stage] / self.span_s


def idle_of(rows: Sequence[Sequence[Done]]) -> Idle:
    """The bubble of a schedule that was played, from its first beginning to its last end.

    `rows` are what `flatout.machine.cost.schedules.simulated_schedule` gives: of each stage, in order.

    >>> from flatout.machine.cost.schedules import simulated_schedule, schedule_table
    >>> rows = simulated_schedule(schedule_table("gpipe", stages=4, micro_batches=6), seconds=lambda _: 1.0)
    >>> round(idle_of(rows).share, 4)  # (stages - 1) / (micro-batches + stages - 1)
    0.3333
    """
    whole = whole_of(rows)
    free = tuple(whole.length_s - sum(done.end_s - done.begin_s for done in row) for row in rows)
    return Idle(free, whole.length_s, sum(free) / (len(rows) * whole.length_s))


def whole_of(rows: Sequence[Sequence[Done]]) -> Stretch:
    """The time of the first beginning to the last end of all stages."""
    return Stretch(min(row[0].begin_s for row in rows if row), max(row[-1].end_s for row in rows if row))


def stretches(rows: Sequence[Sequence[Done]], *, whole_s: float, ends_s: float) -> tuple[Stretch, ...]:
    """The step as a whole, or where it is longer than `whole_s` its beginning and its end, which take `ends_s` together."""
    whole = whole_of(rows)
    if whole.length_s <= whole_s:
        return (whole,)
    return Stretch(whole.begin_s, whole.begin_s + ends_s / 2), Stretch(whole.end_s - ends_s / 2, whole.end_s)


def shortest_s(rows: Sequence[Sequence[Done]]) -> float:
    """The mean length of the kind of action whose mean is the shortest."""
    lengths: dict[str, list[float]] = defaultdict(list)
    for done in chain.from_iterable(rows):
        lengths[done.action.kind].append(done.end_s - done.begin_s)
    return min(map(fmean, lengths.values()))


def shown(num: int, *, most: int = MOST_STAGES, besides: int = 0) -> tuple[int, ...]:
    """The first and the last of `num` stages, `most` of them, and the one that is named `besides`.

    >>> shown(3), shown(64, most=4), shown(64, most=4, besides=9)
    ((0, 1, 2), (0, 1, 62, 63), (0, 1, 9, 62, 63))
    """
    if num <= most:
        return tuple(range(num))
    half = most // 2
    return tuple(sorted({*range(half), besides, *range(num - half, num)}))


class Timeline(NamedTuple):
    """The drawing, and what stands around it on a page."""

    svg: Markup
    idle: Idle
    kinds: tuple[tuple[str, str, str], ...]
    """Letter, name and colour of each kind that the schedule has."""
    num_hidden: int
    """Stages that are not drawn."""
    cut_s: float
    """Seconds in the middle that are not drawn."""
    num_parts: int
    """Parts of the model that a stage holds, at most."""


class _Piece(NamedTuple):
    """A stretch of the step and where it is drawn."""

    stretch: Stretch
    left_px: float
    px_per_s: float

    def x(self, at_s: float) -> float:
        """Pixels from the figure's left edge; ends outside of the stretch are its own ends."""
        at_s = min(max(at_s, self.stretch.begin_s), self.stretch.end_s)
        return self.left_px + (at_s - self.stretch.begin_s) * self.px_per_s

    @property
    def width_px(self) -> float:
        """Of the whole stretch."""
        return self.stretch.length_s * self.px_per_s


def pipeline_of(rows: Sequence[Sequence[Done]]) -> Timeline | None:
    """The timeline of a schedule that `simulated_schedule` gives; None for a single stage, which has no bubble."""
    if len(rows) < 2:
        return None
    idle = idle_of(rows)
    pieces = _pieces(rows)
    stages = shown(len(rows))
    tops = _tops(stages)
    bottom_px = max(tops.values()) + _ROW_PX
    drawn = [_DEFS, *_heads(pieces), *_axis(pieces, bottom_px), *_elisions(stages, tops)]
    for stage in stages:
        drawn += _row(rows[stage], stage, tops[stage], pieces, idle)
    height_px = round(bottom_px + _AXIS_PX)
    label = (
        f"Timeline of {len(rows)} pipeline stages over {units.duration(idle.span_s)}: bubble is "
        f"{units.percent(idle.share)} of all stages' time"
    )
    svg = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        'class="figure pipeline">{drawn}</svg>'
    ).format(width=WIDTH_PX, height=height_px, label=label, drawn=Markup("").join(drawn))
    cut_s = pieces[1].stretch.begin_s - pieces[0].stretch.end_s if len(pieces) > 1 else 0.0
    used = {done.action.kind for row in rows for done in row}
    kinds = tuple((kind, name, _STYLES[kind]) for kind, name in KINDS.items() if kind in used)
    num_parts = max(len({done.action.chunk for done in row}) for row in rows)
    return Timeline(svg, idle, kinds, len(rows) - len(stages), cut_s, num_parts)


_DEFS: Final = Markup(
    '<defs><pattern id="pipeline-bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="6" height="6" class="ground"/><rect width="2" height="6" class="stripe"/></pattern></defs>'
)


def _pieces(rows: Sequence[Sequence[Done]]) -> tuple[_Piece, ...]:
    """The step over the figure's whole width, or its two ends with room for the cut between them."""
    inner_px = WIDTH_PX - _LEFT_PX - _RIGHT_PX
    least_s = shortest_s(rows)
    found = stretches(rows, whole_s=inner_px / _LEAST_PX * least_s, ends_s=(inner_px - _CUT_PX) / _CUT_BOX_PX * least_s)
    room_px = inner_px if len(found) == 1 else inner_px - _CUT_PX
    px_per_s = room_px / sum(stretch.length_s for stretch in found)
    pieces, left_px = [], float(_LEFT_PX)
    for stretch in found:
        pieces.append(_Piece(stretch, left_px, px_per_s))
        left_px += stretch.length_s * px_per_s + _CUT_PX
    return tuple(pieces)


def _tops(stages: Sequence[int]) -> dict[int, float]:
    """Where each row begins; where stages are left out there is room of a row to say so."""
    tops, top_px, before = {}, float(_TOP_PX), -1
    for stage in stages:
        top_px += _ROW_PX if stage != before + 1 else 0
        tops[stage] = top_px
        top_px, before = top_px + _ROW_PX + _GAP_PX, stage
    return tops


def _row(row: Sequence[Done], stage: int, top_px: float, pieces: Sequence[_Piece], idle: Idle) -> Iterator[Markup]:
    """The bubble is the ground of a row; what is done lies on it."""
    middle_px = top_px + _ROW_PX / 2
    waits = f"stage {stage}: bubble {units.duration(idle.of_stages_s[stage])}, {units.percent(idle.share_of(stage))}"
    yield _text(_LEFT_PX - 12, middle_px, f"stage {stage}", look="end")
    for piece in pieces:
        yield _rect(piece.left_px, top_px, piece.width_px, look="bubble", tip=waits)
    yield _text(WIDTH_PX - 2, middle_px, units.percent(idle.share_of(stage)), look="end")
    parts = {chunk: part for part, chunk in enumerate(sorted({done.action.chunk for done in row}))}
    for done in row:
        for piece in pieces:
            if done.begin_s < piece.stretch.end_s and done.end_s > piece.stretch.begin_s:
                yield from _box(done, piece, top_px, part=parts[done.action.chunk], num_parts=len(parts))


def _box(done: Done, piece: _Piece, top_px: float, *, part: int, num_parts: int) -> Iterator[Markup]:
    """Solid for a stage's first part of the model, pale for its second, and so on in turn; with its micro-batch if that fits."""
    action = done.action
    left_px, width_px = piece.x(done.begin_s), piece.x(done.end_s) - piece.x(done.begin_s)
    of_part = f", part {part + 1} of {num_parts}" if num_parts > 1 else ""
    tip = f"{KINDS[action.kind]} of micro-batch {action.micro_batch}{of_part}: {units.duration(done.end_s - done.begin_s)}"
    pale = " pale" if part % 2 else ""
    yield _rect(left_px, top_px, max(width_px - 0.6, 0.4), look=f"box kind-{_STYLES[action.kind]}{pale}", tip=tip)
    for text in (f"{action.kind}{action.micro_batch}", f"{action.micro_batch}"):
        if letters_px(text, _LETTER_PX) <= width_px - 1:
            yield _text(left_px + width_px / 2, top_px + _ROW_PX / 2, text, look=f"middle on{pale}")
            return


def _heads(pieces: Sequence[_Piece]) -> Iterator[Markup]:
    """What the columns are, and what lies between two pieces."""
    yield _text(WIDTH_PX - 2, 9, "bubble", look="end")
    if len(pieces) == 2:
        first, second = pieces
        cut_s = second.stretch.begin_s - first.stretch.end_s
        yield _text(second.left_px - _CUT_PX / 2, 9, f"{units.duration(cut_s)} left out", look="middle")


def _elisions(stages: Sequence[int], tops: dict[int, float]) -> Iterator[Markup]:
    for before, stage in pairwise(stages):
        if stage != before + 1:
            hidden = f"{stage - before - 1} stages between"
            yield _text(_LEFT_PX, tops[stage] - _ROW_PX / 2 - _GAP_PX / 2, hidden, look="start")


def _axis(pieces: Sequence[_Piece], bottom_px: float) -> Iterator[Markup]:
    """Round seconds under each piece, counted from the step's beginning."""
    begin_s = pieces[0].stretch.begin_s
    shown_s = sum(piece.stretch.length_s for piece in pieces)
    unit = units.time_unit(pieces[-1].stretch.end_s - begin_s)
    step_s = _round_step(shown_s / 8)
    for piece in pieces:
        first = math.ceil((piece.stretch.begin_s - begin_s) / step_s - 1e-9)
        last = math.floor((piece.stretch.end_s - begin_s) / step_s + 1e-9)
        for count in range(first, last + 1):
            x = piece.x(begin_s + count * step_s)
            yield Markup('<path d="M{x:.1f} {top}V{bottom:.0f}" class="tick"/>').format(
                x=x, top=_TOP_PX - 2, bottom=bottom_px + 5
            )
            label = f"{count * step_s / unit.seconds:.6g} {unit.name}" if count else "0"
            yield _text(x, bottom_px + 16, label, look="middle")


def _round_step(about_s: float) -> float:
    """The nearest of 1, 2, 2.5, 5 times a power of ten above it."""
    power = 10.0 ** math.floor(math.log10(about_s))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= about_s)


def _rect(left_px: float, top_px: float, width_px: float, *, look: str, tip: str) -> Markup:
    return Markup(
        '<rect x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{height}" class="{look}"><title>{tip}</title></rect>'
    ).format(x=left_px, y=top_px, width=width_px, height=_ROW_PX, look=look, tip=tip)


def _text(x: float, y: float, text: str, *, look: str) -> Markup:
    return Markup('<text x="{x:.1f}" y="{y:.1f}" class="{look}">{text}</text>').format(x=x, y=y, look=look, text=text)
