"""One real step on a time axis: phases and operators of the host above, kernels and copies of the device below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import RankedFinding
from flatout.core.records.span import Span
from flatout.report.bars import phase_label
from flatout.report.html.figure import SMALL_PX, WIDTH_PX, PageFigure, colour, figure, letters_px, phase_colour
from flatout.report.sanitise import inert, place_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEFT_PX: Final = 84
_RIGHT_PX: Final = 14
_AXIS_PX: Final = 30
_GAP_PX: Final = 10
_NEAR_PX: Final = 3.0
"""Spans of one cause that are this near to one another are marked as one stretch."""
_MOST_SPANS: Final = 1200
"""Spans drawn, the longest: a page must stay small."""
_HAIR_PX: Final = 0.6
"""No span is drawn thinner, or it could not be seen; neighbours are that far apart."""


class _TimelineRow(NamedTuple):
    """One track: what stands left of it and how high it is."""

    track: str
    label: str
    height_px: float


_ROWS: Final = (
    _TimelineRow("phase", "phase", 26),
    _TimelineRow("host", "operators", 36),
    _TimelineRow("cause", "causes", 20),
    _TimelineRow("device", "device", 36),
    _TimelineRow("copy", "copies", 18),
)


class _Sheet(NamedTuple):
    """Where to draw."""

    figure: PageFigure
    axes: Axes
    px_per_s: float


def timeline_svg(evidence: Evidence, findings: Sequence[RankedFinding]) -> Markup | None:
    """The timeline, or None when there is none; what a finding names is lit up and carries its number."""
    timeline = evidence.timeline
    if timeline is None or not timeline.spans or timeline.duration_s <= 0:
        return None
    causes = _causes_by_source(evidence, findings)
    spans = sorted((s for s in timeline.spans if s.duration_s > 0), key=lambda s: -s.duration_s)[:_MOST_SPANS]
    tracks = {s.track for s in spans}
    if any(s.source in causes and s.track in ("host", "device") for s in spans):
        tracks.add("cause")
    rows = [row for row in _ROWS if row.track in tracks]
    if not rows:
        return None
    height_px = sum(row.height_px + _GAP_PX for row in rows) + _AXIS_PX
    end_s = max([timeline.duration_s] + [s.start_s + s.duration_s for s in spans])
    with figure("timeline", width_px=WIDTH_PX, height_px=height_px) as drawn:
        axes = drawn.axes(left=_LEFT_PX, right=_RIGHT_PX, top=2, bottom=_AXIS_PX)
        inner_px = WIDTH_PX - _LEFT_PX - _RIGHT_PX
        axes.set_xlim(0, end_s)
        axes.set_ylim(height_px - _AXIS_PX - 2, 0)
        sheet = _Sheet(drawn, axes, inner_px / end_s)
        top = 0.0
        for row in rows:
            axes.text(
                -12 / sheet.px_per_s, top + row.height_px / 2, row.label, ha="right", va="center", color=colour("muted")
            )
            _draw(sheet, evidence, spans, row, top, causes)
            top += row.height_px + _GAP_PX
        _time_axis(axes, end_s)
        return drawn.svg(label=f"Timeline of one step of {units.duration(timeline.duration_s)}")


def _draw(
    sheet: _Sheet, evidence: Evidence, spans: Sequence[Span], row: _TimelineRow, top: float, causes: dict[int, int]
) -> None:
    if row.track == "phase":
        for span in (s for s in spans if s.track == "phase"):
            _phase(sheet, span, top, row.height_px)
    elif row.track == "cause":
        own = [s for s in spans if s.track == "host"] or [s for s in spans if s.track == "device"]
        free_s = 0.0
        for number, start_s, stop_s in _stretches(own, causes, _NEAR_PX / sheet.px_per_s):
            free_s = _cause(sheet, number, start_s, stop_s, top, row.height_px, free_s=free_s)
    else:
        if row.track == "host":
            _python(sheet, spans, top, row.height_px)
        for span in (s for s in spans if s.track == row.track):
            _bar(sheet, evidence, span, top, row.height_px, causes)


def _phase(sheet: _Sheet, span: Span, top: float, height_px: float) -> None:
    name = inert(phase_label(span.name))
    width_s = max(span.duration_s, _HAIR_PX / sheet.px_per_s)
    tip = f"{name}: {units.duration(span.duration_s)}{', a wait' if span.is_wait else ''}"
    sheet.figure.bar(
        sheet.axes, span.start_s, top, width_s, height_px, fill=phase_colour(span.name), tip=tip, wait=span.is_wait
    )
    longer, ground = f"{name} {units.duration(span.duration_s)}", phase_colour(span.name) if span.is_wait else None
    bar = (span.start_s, top, span.duration_s, height_px)
    sheet.figure.inscribe(sheet.axes, *bar, name, longer=longer, ground=ground)


def _python(sheet: _Sheet, spans: Sequence[Span], top: float, height_px: float) -> None:
    """A pale ground under the operators: what stays visible of it is Python, or operators too short to keep."""
    for span in (s for s in spans if s.track == "phase"):
        sheet.figure.bar(sheet.axes, span.start_s, top, span.duration_s, height_px, fill=colour("line"))


def _bar(sheet: _Sheet, evidence: Evidence, span: Span, top: float, height_px: float, causes: dict[int, int]) -> None:
    number = causes.get(span.source)
    width_px = span.duration_s * sheet.px_per_s
    width_px = width_px - _HAIR_PX if width_px > 4 * _HAIR_PX else max(width_px, _HAIR_PX)
    source = evidence.source_of(span.source)
    place = place_of(source, cwd=evidence.workload.cwd)
    tip_lines = [f"{span.name}: {units.duration(span.duration_s)}{', a wait' if span.is_wait else ''}"]
    tip_lines += [f"{place}: {source.text}" if source else place] if place else []
    tip_lines += [f"cause {number}"] if number else []
    sheet.figure.bar(
        sheet.axes,
        span.start_s,
        top,
        width_px / sheet.px_per_s,
        height_px,
        fill=colour("hot" if number else "op"),
        tip="; ".join(tip_lines),
        wait=span.is_wait,
    )
    short = inert(span.name).removeprefix("aten.").strip("_")
    bar = (span.start_s, top, span.duration_s, height_px)
    sheet.figure.inscribe(sheet.axes, *bar, short, ink="on-hot" if number else "ink", size_px=SMALL_PX - 1)


def _cause(
    sheet: _Sheet, number: int, start_s: float, stop_s: float, top: float, height_px: float, *, free_s: float
) -> float:
    """Mark a stretch with its cause's number, which needs room from `free_s` on; returns from where there is room then."""
    sheet.figure.bar(sheet.axes, start_s, top, stop_s - start_s, 4, fill=colour("hot"), tip=f"cause {number}")
    middle_s, half_s = (start_s + stop_s) / 2, (letters_px(str(number)) / 2 + 1) / sheet.px_per_s
    if stop_s - start_s < 2 * half_s or middle_s - half_s < free_s:
        return free_s
    sheet.axes.text(
        middle_s,
        top + height_px,
        str(number),
        ha="center",
        va="bottom",
        fontsize=11,
        fontweight="bold",
        color=colour("hot"),
    )
    return middle_s + half_s


def _causes_by_source(evidence: Evidence, findings: Sequence[RankedFinding]) -> dict[int, int]:
    """The number of the first finding that names a source line, by the line's index."""
    numbers: dict[tuple[str, int, str], int] = {}
    for number, finding in enumerate(findings, start=1):
        library = finding.via[-1].place if finding.via else ""
        for place in ((finding.file, finding.line, library), *((s.file, s.line, s.library) for s in finding.also)):
            numbers.setdefault(place, number)
    # A cause at a line of a library is none of the user's whole line; one at the user's line is all that runs below it.
    found = {
        i: numbers.get((s.file, s.line, s.library)) or numbers.get((s.file, s.line, ""))
        for i, s in enumerate(evidence.sources)
    }
    return {i: number for i, number in found.items() if number is not None}


def _stretches(spans: Sequence[Span], causes: dict[int, int], near_s: float) -> list[tuple[int, float, float]]:
    """(number of the cause, start, end) of spans of one cause that nearly touch, in order of time."""
    marked = sorted((s.start_s, s.start_s + s.duration_s, causes[s.source]) for s in spans if s.source in causes)
    found: list[tuple[int, float, float]] = []
    for start_s, stop_s, number in marked:
        if found and found[-1][0] == number and start_s - found[-1][2] <= near_s:
            _, first_s, last_s = found.pop()
            found.append((number, first_s, max(last_s, stop_s)))
        else:
            found.append((number, start_s, stop_s))
    return found


def _time_axis(axes: Axes, end_s: float) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    unit = units.time_unit(end_s)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s / unit.seconds:g} {unit.name}" if s else "0"))
    axes.yaxis.set_visible(False)
    axes.tick_params(axis="x", pad=4)
    axes.grid(axis="x")
