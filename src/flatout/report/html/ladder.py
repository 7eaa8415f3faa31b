"""What tuning found, as one HTML file: its report with a bar for the step after each lever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.plan import Tuned
from flatout.report.document import Drawing
from flatout.report.html.document import document_page
from flatout.report.html.figure import WIDTH_PX, PageFigure, colour, figure, fitting
from flatout.report.parts.ladder import TOGETHER, UNTOUCHED, Row, ladder_blocks, ladder_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_PX: Final = 40
_NAMES_PX: Final = 300
_VALUES_PX: Final = 120


def ladder_html(tuned: Tuned) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file."""
    title, *blocks = ladder_blocks(tuned)
    bars = bars_svg(ladder_rows(tuned)) if tuned.plan.lever else None
    drawing = [Drawing(bars, "A step after each lever, and all together, with 95 % intervals")] if bars else []
    return document_page([title, *drawing, *blocks], command=" ".join((tuned.plan.script, *tuned.plan.arguments)))


def bars_svg(steps: Sequence[Row]) -> Markup | None:
    """A bar for the step after each rung, with its interval; None where no step was timed."""
    timed = [(row, row.step_s) for row in steps if row.step_s is not None]
    if len(timed) < 2:
        return None
    longest_s = max(step_s[2] for _, step_s in timed)
    with figure("ladder", width_px=WIDTH_PX, height_px=_ROW_PX * len(timed) + 8) as drawn:
        axes = drawn.axes(left=_NAMES_PX, right=_VALUES_PX, top=4, bottom=4)
        axes.set_xlim(0, longest_s)
        axes.set_ylim(len(timed), 0)
        axes.set_axis_off()
        for index, (row, step_s) in enumerate(timed):
            _bar(drawn, axes, row, step_s, index, longest_s)
        first, last = timed[0][0].step, timed[-1][0].step
        return drawn.svg(label=f"A step after each lever, from {first} to {last}")


def _bar(
    drawn: PageFigure, axes: Axes, row: Row, seconds: tuple[float, float, float], index: int, longest_s: float
) -> None:
    step_s, low_s, high_s = seconds
    middle = index + 0.5
    fill = colour({UNTOUCHED: "op", TOGETHER: "optimizer"}.get(row.name, "accent"))
    tip = f"{row.name}: {units.duration(step_s)} a step, {units.duration(low_s)} to {units.duration(high_s)}"
    drawn.bar(axes, 0, index + 0.18, step_s, 0.64, fill=fill, tip=tip)
    if high_s > low_s:
        whisker = ([low_s, high_s], [middle, middle])
        ends = [([end, end], [middle - 0.14, middle + 0.14]) for end in (low_s, high_s)]
        for xs, ys in (whisker, *ends):
            axes.plot(xs, ys, color=colour("ink"), linewidth=1.4, clip_on=False)
    gap = 10 * longest_s / (WIDTH_PX - _NAMES_PX - _VALUES_PX)
    axes.text(-gap, middle, fitting(row.name, _NAMES_PX - 16), ha="right", va="center")
    axes.text(max(step_s, high_s) + gap, middle, row.step, ha="left", va="center", fontweight="bold")
