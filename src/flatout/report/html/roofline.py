"""The roofline of this machine, and each hot line as a point under it; beside it the lines that only move data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import HotLine
from flatout.machine.cost.roofline import Roof, roofs
from flatout.report.html.figure import SMALL_PX, WIDTH_PX, PageFigure, colour, figure, letters_px, rounded
from flatout.report.places import innermost_place
from flatout.report.sanitise import inert

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEIGHT_PX: Final = 430
_LEFT_PX: Final = 84
_RIGHT_PX: Final = 108
_TOP_PX: Final = 34
_BOTTOM_PX: Final = 50
_MOVING_PX: Final = 196
"""Width of the panel of lines that only move data."""
_BETWEEN_PX: Final = 152
_LARGEST_PX: Final = 28
_SMALLEST_PX: Final = 8
"""Diameters of the points of the longest and of the shortest lines; the area tells the time."""
_LINE_PX: Final = SMALL_PX + 3
_DECADES: Final = 3.2
"""Below this many decades under the roofs a line does next to nothing there; its point lies on the lower edge."""

Box = tuple[float, float, float, float]


class _Axis(NamedTuple):
    """A logarithmic axis: its ends, and how many pixels it has."""

    low: float
    high: float
    px: float

    def at(self, value: float) -> float:
        return math.log10(value / self.low) / math.log10(self.high / self.low) * self.px

    def value(self, px: float) -> float:
        return float(self.low * (self.high / self.low) ** (px / self.px))


class _Point(NamedTuple):
    """A hot line, its number in the table, and where its point goes."""

    number: int
    line: HotLine
    x: float
    y: float


def roofline_svg(evidence: Evidence, lines: Sequence[HotLine]) -> Markup | None:
    """Both panels with `lines` numbered from 1; None without a measured machine or a line that works or moves anything."""
    numbered = [(n, line) for n, line in enumerate(lines, start=1) if line.bytes_per_s > 0]
    working = [_Point(n, line, line.intensity, line.flop_per_s) for n, line in numbered if line.flop > 0]
    moving = [(n, line) for n, line in numbered if line.flop <= 0]
    if evidence.machine is None or not numbered:
        return None
    used = {t.dtype for o in evidence.operators for t in (*o.inputs, *o.outputs)}
    compute, memory = roofs(evidence.machine, dtypes=used)
    if not compute or not memory:
        return None
    longest_s = max(line.seconds for _, line in numbered)
    cwd = evidence.workload.cwd
    with figure("roofline", width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        if moving:
            _moving_panel(drawn, moving, memory, longest_s, cwd)
        if working:
            left_px = _LEFT_PX + (_MOVING_PX + _BETWEEN_PX if moving else 0)
            _working_panel(drawn, working, compute, memory, longest_s, cwd, left_px=left_px)
        return drawn.svg(label=f"Roofline of this machine with {len(numbered)} source lines as points")


# ------------------------------------------------------------------------------------------------- lines that only move data


def _moving_panel(
    drawn: PageFigure, lines: Sequence[tuple[int, HotLine]], memory: Sequence[Roof], longest_s: float, cwd: str
) -> None:
    """Bytes per second of each line beside the bandwidths there are."""
    axes = drawn.axes(left=_LEFT_PX, right=WIDTH_PX - _LEFT_PX - _MOVING_PX, top=_TOP_PX, bottom=_BOTTOM_PX)
    high = max([r.rate for r in memory] + [line.bytes_per_s for _, line in lines]) * 1.8
    low = max(min(r.rate for r in memory) / 10**_DECADES, min(line.bytes_per_s for _, line in lines) / 2.5)
    y = _Axis(low, high, _HEIGHT_PX - _TOP_PX - _BOTTOM_PX)
    _dress(axes, "y", y, units.size_rate)
    axes.set_xlim(0, _MOVING_PX)
    axes.set_xticks([])
    axes.set_title("lines that only move data", fontsize=SMALL_PX, loc="left", pad=14)
    for roof in memory:
        axes.axhline(roof.rate, color=colour("ink"), linewidth=1.6)
        label = f"{roof.name} {units.size_rate(roof.rate)}"
        axes.annotate(label, (_MOVING_PX, roof.rate), (0, 4), textcoords="offset points", ha="right")
    pitch_px = _MOVING_PX / len(lines)
    points = [_Point(n, line, (i + 0.5) * pitch_px, line.bytes_per_s) for i, (n, line) in enumerate(lines)]
    _points(drawn, axes, points, longest_s, cwd, None, y)


# -------------------------------------------------------------------------------------------------------- lines that compute


def _working_panel(
    drawn: PageFigure,
    points: Sequence[_Point],
    compute: Sequence[Roof],
    memory: Sequence[Roof],
    longest_s: float,
    cwd: str,
    *,
    left_px: float,
) -> None:
    """FLOP per second over FLOP per byte, log-log, under the roofs."""
    axes = drawn.axes(left=left_px, right=_RIGHT_PX, top=_TOP_PX, bottom=_BOTTOM_PX)
    best = max(r.rate for r in compute)
    ridges = [best / r.rate for r in memory]
    xs, ys = [p.x for p in points], [p.y for p in points]
    x = _Axis(min([*xs, *ridges]) / 3, max([*xs, *ridges]) * 3, WIDTH_PX - left_px - _RIGHT_PX)
    low_y = max(min(*ys, best / 10) / 2.5, best / 10**_DECADES)
    y = _Axis(low_y, max([*ys, best]) * 1.8, _HEIGHT_PX - _TOP_PX - _BOTTOM_PX)
    _dress(axes, "x", x, units.number)
    _dress(axes, "y", y, units.work_rate)
    axes.set_title("lines that compute", fontsize=SMALL_PX, loc="left", pad=14)
    axes.set_xlabel("arithmetic intensity, FLOP per byte moved", labelpad=8)
    _flat_roofs(axes, compute, memory, x, y)
    _slanting_roofs(axes, memory, best, x, y)
    _points(drawn, axes, points, longest_s, cwd, x, y)


def _flat_roofs(axes: Axes, compute: Sequence[Roof], memory: Sequence[Roof], x: _Axis, y: _Axis) -> None:
    best_bandwidth = max(r.rate for r in memory)
    last_px = math.inf
    for roof in sorted(compute, key=lambda r: -r.rate):
        if roof.rate <= y.low:
            continue
        start = max(x.low, roof.rate / best_bandwidth)
        axes.plot([start, x.high], [roof.rate, roof.rate], color=colour("ink"), linewidth=1.6)
        at_px = min(y.at(roof.rate), last_px - 2.3 * _LINE_PX)
        last_px = at_px
        axes.annotate(
            f"{roof.name}\n{units.work_rate(roof.rate)}",
            (x.high, roof.rate),
            (8, at_px - y.at(roof.rate)),
            textcoords="offset points",
            va="center",
            linespacing=1.3,
        )


def _slanting_roofs(axes: Axes, memory: Sequence[Roof], best_rate: float, x: _Axis, y: _Axis) -> None:
    slope = math.atan2(y.px / math.log10(y.high / y.low), x.px / math.log10(x.high / x.low))
    for roof in memory:
        low, high = max(x.low, y.low / roof.rate), min(x.high, best_rate / roof.rate)
        if low >= high:
            continue
        axes.plot([low, high], [low * roof.rate, high * roof.rate], color=colour("ink"), linewidth=1.6)
        label = f"{roof.name} {units.size_rate(roof.rate)}"
        room_px = math.hypot(x.at(high) - x.at(low), y.at(high * roof.rate) - y.at(low * roof.rate))
        if letters_px(label) < room_px - 10:
            axes.annotate(
                label,
                (low, low * roof.rate),
                (12 * math.cos(slope) - 5 * math.sin(slope), 12 * math.sin(slope) + 5 * math.cos(slope)),
                textcoords="offset points",
                rotation=math.degrees(slope),
                rotation_mode="anchor",
            )


# --------------------------------------------------------------------------------------------------------------- both panels


def _dress(axes: Axes, which: Literal["x", "y"], scale: _Axis, show: Callable[[float], str]) -> None:
    """A logarithmic axis with a few round ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(scale.low, scale.high)
    is_short = math.log10(scale.high / scale.low) < 2.6
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if is_short else (1,), numticks=12))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: rounded(show(value))))
    axes.grid()


def _points(
    drawn: PageFigure, axes: Axes, points: Sequence[_Point], longest_s: float, cwd: str, x: _Axis | None, y: _Axis
) -> None:
    """The points, largest first, each with its number where there is room for it. Without `x` that axis is in pixels."""
    taken: list[Box] = []
    for point in sorted(points, key=lambda p: -p.line.seconds):
        line = point.line
        is_off = point.y < y.low
        diameter = max(_SMALLEST_PX, _LARGEST_PX * math.sqrt(line.seconds / longest_s))
        at = (point.x, max(point.y, y.value(diameter / 2)))
        shape = axes.plot(
            *at,
            marker="v" if is_off else "o",
            markersize=diameter,
            linestyle="none",
            markerfacecolor=colour(line.regime),
            markeredgecolor=colour("paper"),
            markeredgewidth=1,
            zorder=3,
        )[0]
        rate = units.work_rate(line.flop_per_s) + f" at {units.number(line.intensity)} FLOP/B, " if line.flop else ""
        drawn.tip(
            shape,
            f"{point.number}: {innermost_place(line.source, cwd=cwd)}: {inert(line.source.text)}; "
            f"{units.duration(line.seconds)} a step, {rate}{units.size_rate(line.bytes_per_s)}; {line.regime}-bound",
        )
        middle = (x.at(at[0]) if x else at[0], y.at(at[1]))
        _number(axes, str(point.number), at, middle, diameter, taken)


def _number(
    axes: Axes, text: str, at: tuple[float, float], middle: tuple[float, float], diameter: float, taken: list[Box]
) -> None:
    """The point's number: inside when it fits, else beside it, where nothing else stands."""
    width, height = letters_px(text) + 2, SMALL_PX + 1
    own = _box(middle, diameter, diameter)
    reach = diameter / 2 + 2
    spots = [(reach + width / 2, 0.0), (-reach - width / 2, 0.0), (0.0, reach + height / 2), (0.0, -reach - height / 2)]
    spots += [(a * (reach + width / 2), b * (reach + height / 2)) for a in (1, -1) for b in (1, -1)]
    spots += [(dx * 2.2, dy * 2.2) for dx, dy in spots]
    if diameter >= width + 4 and not any(_meet(own, box) for box in taken):
        spots.insert(0, (0.0, 0.0))
    boxes = [_box((middle[0] + dx, middle[1] + dy), width, height) for dx, dy in spots]
    best = next((i for i, box in enumerate(boxes) if not any(_meet(box, other) for other in taken)), 0)
    taken += [own, boxes[best]]
    axes.annotate(
        text,
        at,
        spots[best],
        textcoords="offset points",
        ha="center",
        va="center_baseline",
        fontweight="bold",
        fontsize=SMALL_PX - 1,
        color=colour("on-phase" if spots[best] == (0.0, 0.0) else "ink"),
        zorder=4,
    )


def _box(middle: tuple[float, float], width: float, height: float) -> Box:
    return middle[0] - width / 2, middle[1] - height / 2, middle[0] + width / 2, middle[1] + height / 2


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
