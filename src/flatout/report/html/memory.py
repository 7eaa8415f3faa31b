"""Memory over one step: the curve, the phases under it, and the peak."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.memory import Memory, MemoryPoint
from flatout.report.bars import phase_label
from flatout.report.html.figure import WIDTH_PX, PageFigure, colour, figure, phase_colour, rounded
from flatout.report.sanitise import inert

_HEIGHT_PX: Final = 230
_LEFT_PX: Final = 84
_RIGHT_PX: Final = 14
_RIBBON_PX: Final = 22


def memory_svg(memory: Memory, *, name: str) -> Markup | None:
    """The curve of one device's memory, or None when there is none; `name` is the figure's own on the page."""
    points = memory.curve
    if len(points) < 2:
        return None
    highest = max(points, key=lambda p: p.bytes)
    with figure(name, width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        _curve(drawn, points, highest)
        _ribbon(drawn, points)
        return drawn.svg(label=f"Memory on {memory.device} over one step, at most {units.size(highest.bytes)}")


def _curve(drawn: PageFigure, points: Sequence[MemoryPoint], highest: MemoryPoint) -> None:
    """Bytes over the step; the most is marked and told."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    axes = drawn.axes(left=_LEFT_PX, right=_RIGHT_PX, top=24, bottom=_RIBBON_PX + 8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, max(highest.bytes, 1) * 1.08)
    at, size = _ends(points), [*(p.bytes for p in points), points[-1].bytes]
    axes.fill_between(at, size, step="post", color=colour("accent"), linewidth=0, alpha=0.18)
    axes.step(at, size, where="post", color=colour("accent"), linewidth=1.6)
    peak = axes.plot(highest.at, highest.bytes, marker="o", markersize=7, color=colour("hot"), linestyle="none")[0]
    drawn.tip(peak, f"the most in this step: {units.size(highest.bytes)}, in {highest.phase}")
    is_late = highest.at > 0.8
    axes.annotate(
        units.size(highest.bytes),
        (highest.at, highest.bytes),
        (-8 if is_late else 8, 6),
        textcoords="offset points",
        ha="right" if is_late else "left",
        fontweight="bold",
        color=colour("hot"),
    )
    axes.yaxis.set_major_locator(FixedLocator(_ticks(highest.bytes)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: rounded(units.size(value))))
    axes.xaxis.set_visible(False)
    axes.grid(axis="y")


def _ribbon(drawn: PageFigure, points: Sequence[MemoryPoint]) -> None:
    """The phases below the curve."""
    axes = drawn.axes(left=_LEFT_PX, right=_RIGHT_PX, top=_HEIGHT_PX - _RIBBON_PX, bottom=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_axis_off()
    for phase, group in groupby(zip(points, _ends(points)[1:], strict=True), key=lambda pair: pair[0].phase):
        stretch = list(group)
        start, end = stretch[0][0].at, stretch[-1][1]
        label = inert(phase_label(phase))
        drawn.bar(axes, start, 0, end - start, 1, fill=phase_colour(phase), tip=label)
        drawn.inscribe(axes, start, 0, end - start, 1, label)


def _ends(points: Sequence[MemoryPoint]) -> list[float]:
    """Where the points begin, and where the last one ends."""
    return [*(p.at for p in points), max(1.0, points[-1].at)]


def _ticks(most_bytes: float) -> list[float]:
    """Two to five round sizes up to the most: whole powers of two, since sizes are counted in them."""
    step = 2.0 ** math.floor(math.log2(max(most_bytes, 1.0) / 2))
    return [i * step for i in range(int(max(most_bytes, 1.0) / step) + 1)]
