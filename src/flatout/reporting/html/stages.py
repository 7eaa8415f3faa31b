"""Stacked bars as lists of lengths, for a template that draws them: memory of stages, and parts of steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatout.records.scale import Ranked, StageMemory
from flatout.reporting import units
from flatout.reporting.pipeline import shown
from flatout.reporting.reasons import spent, where_it_goes
from flatout.reporting.scale import layout_text
from flatout.reporting.stages import PARTS, fullest, held


class Piece(NamedTuple):
    """A part of a bar: a class of the style, what it says when it is pointed at, and its length as a fraction of its bar."""

    style: str
    tip: str
    fraction: float


class Bar(NamedTuple):
    """A line of the chart. Fractions are of the chart's width."""

    name: str
    value: str
    pieces: tuple[Piece, ...]
    fraction: float
    label: str
    remark: str = ""
    interval: tuple[float, float] | None = None
    is_over: bool = False
    num_before: int = 0
    """Lines that are left out above it."""


class Chart(NamedTuple):
    """Bars, the colours in them, and where the limit is drawn, if there is one."""

    bars: tuple[Bar, ...]
    legend: tuple[tuple[str, str], ...]
    limit: float | None = None


def memory_chart(stages: Sequence[StageMemory], *, room_bytes: float | None) -> Chart:
    """A bar a stage, all on one scale that holds the limit too."""
    most = max([room_bytes or 0.0, *(stage.total_bytes for stage in stages)]) * 1.02
    bars, before = [], -1
    for stage in shown(len(stages), besides=fullest(stages)):
        name = f"stage {stage}" if len(stages) > 1 else "fullest"
        bars.append(_of_stage(stages[stage], name, most, room_bytes, num_before=stage - before - 1))
        before = stage
    used = {part.label for stage in stages for part, _ in held(stage)}
    legend = tuple((part.style, part.label) for part in PARTS.values() if part.label in used)
    return Chart(tuple(bars), legend, None if room_bytes is None else room_bytes / most)


def step_chart(ranked: Sequence[Ranked]) -> Chart:
    """A bar a layout, as long as its step, with its interval."""
    longest_s = max(one.high_s for one in ranked)
    bars = tuple(_of_step(place, one, longest_s) for place, one in enumerate(ranked, start=1))
    used = {
        s.part.label: s.part.style for one in ranked for s in spent(one.step) if s.seconds >= 0.0005 * one.step.total_s
    }
    order = [s.part for s in spent(ranked[0].step)]
    return Chart(bars, tuple((part.style, part.label) for part in order if part.label in used))


def _of_stage(memory: StageMemory, name: str, most: float, room_bytes: float | None, *, num_before: int) -> Bar:
    total = memory.total_bytes
    is_over = room_bytes is not None and total > room_bytes
    told = ", ".join(f"{part.label} {units.size(size)}" for part, size in held(memory))
    of = "" if room_bytes is None else f" of {units.size(room_bytes)}{', too large' if is_over else ''}"
    return Bar(
        name=name,
        value=units.size(total),
        pieces=tuple(
            Piece(part.style, f"{part.label}: {units.size(size)}, {units.percent(size / total)}", size / total)
            for part, size in held(memory)
        ),
        fraction=total / most,
        label=f"{name}: {units.size(total)}{of}: {told}",
        remark="" if room_bytes is None else "too large" if is_over else units.percent(total / room_bytes),
        is_over=is_over,
        num_before=num_before,
    )


def _of_step(place: int, one: Ranked, longest_s: float) -> Bar:
    total_s = one.step.total_s
    return Bar(
        name=f"{place}. {layout_text(one.layout)}",
        value=units.duration(total_s),
        pieces=tuple(
            Piece(
                s.part.style,
                f"{s.part.label}: {units.duration(s.seconds)}, {units.percent(s.seconds / total_s)}",
                s.seconds / total_s,
            )
            for s in spent(one.step)
            if s.seconds > 0
        ),
        fraction=total_s / longest_s,
        label=f"layout {place}: {units.duration(total_s)}: {where_it_goes(one.step)}",
        interval=(one.low_s / longest_s, one.high_s / longest_s),
    )
