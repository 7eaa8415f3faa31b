"""Where the step goes: its parts, the longest first, with how far each is above its floor and on which lines it lies."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.core import units
from flatout.core.records.finding import Diagnosis, PartOfStep
from flatout.report.document import Cell, Column, Table, numbers
from flatout.report.sanitise import CodeText, Path, Words, place_of

_MOST_PARTS: Final = 8
_SMALLEST_FRACTION: Final = 0.01
"""A part below this share of the step is told with the others."""
_NARROW: Final = 60
"""Columns below which lines are left out."""
_IN_HEADLINE: Final = 3
_FAR: Final = 999.0
"""Above this many times the floor the figure says only that the kernels' work is next to nothing."""


class ShownParts(NamedTuple):
    """The parts that are told one by one, how many are not, and their seconds together."""

    parts: tuple[PartOfStep, ...]
    num_more: int
    more_s: float


def shown_parts(diagnosis: Diagnosis, *, most: int = _MOST_PARTS) -> ShownParts:
    """The longest parts, and what the others add up to."""
    least_s = _SMALLEST_FRACTION * diagnosis.step_s
    shown = tuple(part for part in diagnosis.parts[:most] if part.seconds >= least_s)
    rest = diagnosis.parts[len(shown) :]
    return ShownParts(shown, len(rest), sum(part.seconds for part in rest))


def step_parts(diagnosis: Diagnosis, *, cwd: str) -> list[Table]:
    """The table of the parts; none where the step was not taken apart."""
    if not diagnosis.parts:
        return []
    shown = shown_parts(diagnosis)
    unit = units.time_unit(diagnosis.step_s)
    lines = Column("mostly at", from_width=_NARROW)
    columns = [Column("where the step goes"), *numbers(unit.name, "share", "of floor"), lines]
    rows: list[list[Cell]] = [
        [
            part_name(part),
            unit.show(part.seconds),
            share_of_step(part.seconds, diagnosis),
            of_floor(part),
            _at(part, cwd),
        ]
        for part in shown.parts
    ]
    if shown.num_more:
        words = units.counted(shown.num_more, "smaller part")
        rows.append([Words(words, "dim"), unit.show(shown.more_s), share_of_step(shown.more_s, diagnosis), "", ""])
    if diagnosis.unexplained_s > 0:
        seconds = diagnosis.unexplained_s
        rows.append([Words("unexplained", "dim"), unit.show(seconds), share_of_step(seconds, diagnosis), "", ""])
    return [Table(columns, rows, title="Where the step goes")]


def part_name(part: PartOfStep) -> str:
    """The part in a few words, with how many operators it consists of where it is their number that costs."""
    has_number = part.kind == "dispatch" and part.num_calls >= 1
    return f"{part.name}, {part.num_calls:.0f} operators" if has_number else part.name


def of_floor(part: PartOfStep) -> str:
    """How many times its floor a part takes; '' where it has none."""
    if part.floor_s is None:
        return ""
    if part.floor_s <= 0 or part.seconds > _FAR * part.floor_s:
        return f">{_FAR:.0f}x"
    return f"{units.number(part.seconds / part.floor_s)}x"


def parts_in_words(diagnosis: Diagnosis) -> str:
    """What a step without a known cause is made of, in half a sentence; '' where nothing is known.

    >>> from flatout.core.records.finding import PartOfStep
    >>> part = PartOfStep(kind="kernels", name="matrix products", seconds=0.03, floor_s=0.02)
    >>> empty = Diagnosis(step_s=0.1, floor_s=None, explained_s=0.0, unexplained_s=0.07, findings=(), notes=(), hot_lines=(),
    ...     checked=(), parts=(part,))
    >>> parts_in_words(empty)
    'it goes into matrix products (30 %, 1.50x their floor)'
    """
    parts = shown_parts(diagnosis, most=_IN_HEADLINE).parts
    described = [
        f"{part.name} ({share_of_step(part.seconds, diagnosis)}{f', {of_floor(part)} their floor' if part.floor_s else ''})"
        for part in parts
    ]
    return f"it goes into {', '.join(described)}" if described else ""


def share_of_step(seconds: float, diagnosis: Diagnosis) -> str:
    """Seconds as a share of the step, in per cent."""
    return units.percent(seconds / diagnosis.step_s if diagnosis.step_s else None)


def _at(part: PartOfStep, cwd: str) -> Cell:
    """The line's text where the part's name is its place, else the place of the longest line."""
    if not part.lines:
        return ""
    source = part.lines[0].source
    if part.kind == "python" and len(part.lines) == 1 and source.text:
        return CodeText(source.text)
    return Path(place_of(source, cwd=cwd))
