"""The roofline of this machine, and each hot line as a point under it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

from flatout.cost.roofline import Roof, roofs
from flatout.records.evidence import Evidence
from flatout.records.finding import HotLine
from flatout.reporting import units
from flatout.reporting.html.figure import SMALL_PX, colour, figure, letters_px
from flatout.reporting.inert import inert, place_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_PX: Final = 760
_HEIGHT_PX: Final = 430
_LEFT_PX: Final = 92
_RIGHT_PX: Final = 124
_TOP_PX: Final = 16
_BOTTOM_PX: Final = 50
_LARGEST_PX: Final = 26
_SMALLEST_PX: Final = 8
"""Diameters of the points of the longest and of the shortest lines; the area tells the time."""
_LINE_PX: Final = SMALL_PX + 3


class _Axis(NamedTuple):
    """A logarithmic axis: its ends, and how many pixels it has."""

    low: float
    high: float
    px: float

    def at(self, value: float) -> float:
        return math.log10(value / self.low) / math.log10(self.high / self.low) * self.px


def roofline_svg(evidence: Evidence, lines: Sequence[HotLine]) -> Markup | None:
    """The roofline with `lines` numbered from 1; None without a measured machine, or when no line does arithmetic."""
    shown = [(number, line) for number, line in enumerate(lines, start=1) if line.intensity > 0 and line.flop_per_s > 0]
    if evidence.machine is None or not shown:
        return None
    used = {t.dtype for o in evidence.operators for t in (*o.inputs, *o.outputs)}
    compute, memory = roofs(evidence.machine, dtypes=used)
    if not compute or not memory:
        return None
    with figure("roofline", width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        axes = drawn.axes(left=_LEFT_PX, right=_RIGHT_PX, top=_TOP_PX, bottom=_BOTTOM_PX)
        x, y = _scales(axes, [line for _, line in shown], compute, memory)
        _ceilings(axes, compute, memory, x, y)
        longest_s = max(line.seconds for _, line in shown)
        taken: list[tuple[float, float, float, float]] = []
        for number, line in sorted(shown, key=lambda item: -item[1].seconds):
            diameter = max(_SMALLEST_PX, _LARGEST_PX * math.sqrt(line.seconds / longest_s))
            mark = axes.plot(
                line.intensity,
                line.flop_per_s,
                marker="o",
                markersize=diameter,
                linestyle="none",
                markerfacecolor=colour(line.regime),
                markeredgecolor=colour("paper"),
                markeredgewidth=1,
                zorder=3,
            )[0]
            place = place_of(line.source, cwd=evidence.workload.cwd)
            drawn.tip(
                mark,
                f"{number}: {place}  {inert(line.source.text)}; {units.duration(line.seconds)} a step, "
                f"{units.work_rate(line.flop_per_s)} at {units.number(line.intensity)} FLOP/B; {line.regime}-bound",
            )
            middle = (x.at(line.intensity), y.at(line.flop_per_s))
            _number(axes, str(number), middle, diameter, taken, x, y)
        return drawn.svg(label=f"Roofline of this machine with {len(shown)} source lines as points")


def _scales(axes: Axes, lines: Sequence[HotLine], compute: Sequence[Roof], memory: Sequence[Roof]) -> tuple[_Axis, _Axis]:
    """Set up both axes, wide enough for the points and for where the roofs meet."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ridge = max((r.rate for r in compute), default=1.0) / min(r.rate for r in memory)
    low_x = min([line.intensity for line in lines] + [ridge / 8]) / 1.8
    high_x = max([line.intensity for line in lines] + [ridge * 2]) * 2.2
    low_y = min([line.flop_per_s for line in lines] + [low_x * min(r.rate for r in memory)]) / 2
    high_y = max([r.rate for r in compute] + [line.flop_per_s for line in lines]) * 1.8
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low_x, high_x)
    axes.set_ylim(low_y, high_y)
    for axis, show in ((axes.xaxis, units.number), (axes.yaxis, units.work_rate)):
        axis.set_major_locator(LogLocator(10))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, show=show: show(value).replace(".00", "")))
    axes.tick_params(colors=colour("muted"), color=colour("line"), length=4)
    axes.grid(color=colour("line"), linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("arithmetic intensity, FLOP per byte moved", color=colour("muted"), labelpad=8)
    return (
        _Axis(low_x, high_x, WIDTH_PX - _LEFT_PX - _RIGHT_PX),
        _Axis(low_y, high_y, _HEIGHT_PX - _TOP_PX - _BOTTOM_PX),
    )


def _ceilings(axes: Axes, compute: Sequence[Roof], memory: Sequence[Roof], x: _Axis, y: _Axis) -> None:
    """Flat roofs of the arithmetic rates, slanting ones of the bandwidths; labels beside and along them."""
    best_bandwidth = max(r.rate for r in memory)
    best_rate = max((r.rate for r in compute), default=y.high)
    last_px = math.inf
    for roof in sorted(compute, key=lambda r: -r.rate):
        start = max(x.low, roof.rate / best_bandwidth)
        axes.plot([start, x.high], [roof.rate, roof.rate], color=colour("ink"), linewidth=1.6)
        at_px = min(y.at(roof.rate), last_px - 2.2 * _LINE_PX)
        last_px = at_px
        shift = (8, at_px - y.at(roof.rate))
        label = f"{roof.name}\n{units.work_rate(roof.rate)}"
        axes.annotate(label, (x.high, roof.rate), shift, textcoords="offset points", va="center", color=colour("ink"))
    angle = math.degrees(
        math.atan2(y.px / math.log10(y.high / y.low), x.px / math.log10(x.high / x.low))
    )
    for roof in memory:
        low = max(x.low, y.low / roof.rate)
        high = min(x.high, best_rate / roof.rate)
        axes.plot([low, high], [low * roof.rate, high * roof.rate], color=colour("ink"), linewidth=1.6)
        label = f"{roof.name} {units.size_rate(roof.rate)}"
        room_px = math.hypot(x.at(high) - x.at(low), y.at(high * roof.rate) - y.at(low * roof.rate))
        if letters_px(label) < room_px - 10:
            axes.annotate(
                label,
                (low, low * roof.rate),
                _along(angle, along_px=12, above_px=5),
                textcoords="offset points",
                rotation=angle,
                rotation_mode="anchor",
                color=colour("ink"),
            )


def _along(angle: float, *, along_px: float, above_px: float) -> tuple[float, float]:
    turn = math.radians(angle)
    return (
        along_px * math.cos(turn) - above_px * math.sin(turn),
        along_px * math.sin(turn) + above_px * math.cos(turn),
    )


def _number(
    axes: Axes,
    text: str,
    middle: tuple[float, float],
    diameter: float,
    taken: list[tuple[float, float, float, float]],
    x: _Axis,
    y: _Axis,
) -> None:
    """The point's number: inside when it fits, else beside it, where nothing else stands."""
    width, height = letters_px(text) + 2, SMALL_PX + 1
    own = (middle[0] - diameter / 2, middle[1] - diameter / 2, middle[0] + diameter / 2, middle[1] + diameter / 2)
    reach = diameter / 2 + 2
    spots = [(reach + width / 2, 0.0), (-reach - width / 2, 0.0), (0.0, reach + height / 2), (0.0, -reach - height / 2)]
    spots += [(a * (reach + width / 2), b * (reach + height / 2)) for a in (1, -1) for b in (1, -1)]
    spots += [(dx * 2.2, dy * 2.2) for dx, dy in spots]
    is_inside = diameter >= width + 4 and not any(_meet(own, box) for box in taken)
    if is_inside:
        spots.insert(0, (0.0, 0.0))
    for dx, dy in spots:
        box = (middle[0] + dx - width / 2, middle[1] + dy - height / 2, middle[0] + dx + width / 2, middle[1] + dy + height / 2)
        if not any(_meet(box, other) for other in taken):
            break
    taken += [own, box]
    at = (x.low * (x.high / x.low) ** (middle[0] / x.px), y.low * (y.high / y.low) ** (middle[1] / y.px))
    axes.annotate(
        text,
        at,
        (dx, dy),
        textcoords="offset points",
        ha="center",
        va="center_baseline",
        fontweight="bold",
        fontsize=SMALL_PX - 1,
        color=colour("on-phase" if (dx, dy) == (0.0, 0.0) else "ink"),
        zorder=4,
    )


def _meet(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
