"""What tuning found, as one HTML file: the rungs as bars and as a table, why each lever is there, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from flatout.records.tuned import Tuned
from flatout.reporting import ladder, units
from flatout.reporting.html.blank import environment, style
from flatout.reporting.html.figure import Figure, colour, figure, fitting
from flatout.reporting.ladder import Row

if TYPE_CHECKING:
    from jinja2 import Template

WIDTH_PX: Final = 1040
_ROW_PX: Final = 40
_NAMES_PX: Final = 300
_VALUES_PX: Final = 120


def ladder_html(tuned: Tuned) -> bytes:
    """One HTML file (UTF-8) that needs no script, no network and no other file."""
    rungs = ladder.rows(tuned)
    page = _template().render(
        tuned=tuned,
        headline=(headline := ladder.headline(tuned)),
        ratio=headline.partition("x faster ")[0] if "x faster " in headline else "",
        lede=headline.partition("x faster ")[2] or headline,
        circumstances=ladder.circumstances(tuned),
        unfinished=ladder.UNFINISHED,
        rungs=rungs,
        others=[
            (title, [one for one in tuned.left_out if one.is_for_script is is_for_script])
            for title, is_for_script in ((ladder.LEFT_OUT, True), ("Not for this script", False))
        ],
        bars=bars_svg(rungs),
        style=style(),
    )
    return page.encode("utf-8", "backslashreplace")


def bars_svg(rungs: Sequence[Row]) -> Markup | None:
    """A bar for the step after each rung, with its interval; None where no step was timed."""
    timed = [row for row in rungs if row.step_s is not None]
    if len(timed) < 2:
        return None
    longest_s = max(row.step_s[2] for row in timed if row.step_s is not None)
    with figure("ladder", width_px=WIDTH_PX, height_px=_ROW_PX * len(timed) + 8) as drawn:
        axes = drawn.axes(left=_NAMES_PX, right=_VALUES_PX, top=4, bottom=4)
        axes.set_xlim(0, longest_s)
        axes.set_ylim(len(timed), 0)
        axes.set_axis_off()
        for index, row in enumerate(timed):
            _bar(drawn, axes, row, index, longest_s)
        first, last = timed[0].step, timed[-1].step
        return drawn.svg(label=f"A step after each lever, from {first} to {last}")


def _bar(drawn: Figure, axes: object, row: Row, index: int, longest_s: float) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes) and row.step_s is not None
    step_s, low_s, high_s = row.step_s
    middle = index + 0.5
    fill = colour("op" if row.name == ladder.UNTOUCHED else "optimizer" if row.name == ladder.TOGETHER else "accent")
    tip = f"{row.name}: {units.duration(step_s)} a step, {units.duration(low_s)} to {units.duration(high_s)}"
    drawn.bar(axes, 0, index + 0.18, step_s, 0.64, fill=fill, tip=tip)
    if high_s > low_s:
        axes.plot([low_s, high_s], [middle, middle], color=colour("ink"), linewidth=1.4, clip_on=False)
        for end in (low_s, high_s):
            axes.plot([end, end], [middle - 0.14, middle + 0.14], color=colour("ink"), linewidth=1.4, clip_on=False)
    gap = 10 * longest_s / (WIDTH_PX - _NAMES_PX - _VALUES_PX)
    axes.text(-gap, middle, fitting(row.name, _NAMES_PX - 16), ha="right", va="center", color=colour("ink"))
    axes.text(
        max(step_s, high_s) + gap, middle, row.step, ha="left", va="center", fontweight="bold", color=colour("ink")
    )


@cache
def _template() -> Template:
    return environment().get_template("ladder.html.jinja")
