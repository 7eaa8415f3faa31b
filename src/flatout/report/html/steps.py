"""How long each step took, in order: drift, outliers and pauses show here."""

from __future__ import annotations

from typing import Final

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.evidence import Steps
from flatout.report.html.figure import WIDTH_PX, colour, figure

_HEIGHT_PX: Final = 150


def steps_svg(steps: Steps) -> Markup | None:
    """The watched steps' durations with their median and its interval; None for fewer than three."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if len(steps.durations_s) < 3:
        return None
    unit = units.time_unit(max(steps.durations_s))
    with figure("steps", width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        axes = drawn.axes(left=84, right=14, top=8, bottom=26)
        last = len(steps.durations_s)
        band = axes.axhspan(steps.low_s, steps.high_s, color=colour("accent"), alpha=0.22, linewidth=0)
        drawn.tip(band, f"95 % interval of the median: {units.duration(steps.low_s)} to {units.duration(steps.high_s)}")
        line = axes.axhline(steps.step_s, color=colour("accent"), linewidth=1.5)
        drawn.tip(line, f"median {units.duration(steps.step_s)}")
        axes.plot(range(1, last + 1), steps.durations_s, color=colour("ink"), linewidth=1.0)
        axes.set_xlim(1, last)
        axes.set_ylim(0, max(steps.durations_s) * 1.1)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s / unit.seconds:g} {unit.name}"))
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.grid(axis="y")
        return drawn.svg(label=f"Durations of {last} watched steps, median {units.duration(steps.step_s)}")
