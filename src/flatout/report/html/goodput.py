"""What failures leave of a run's time, by the way to recover and by the number of devices, as a page of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.failure import Goodput
from flatout.report.document import Column, Drawing, Heading, Table, numbers
from flatout.report.html.bars import Bar, Chart, Piece
from flatout.report.html.document import document_page
from flatout.report.html.figure import SMALL_PX, WIDTH_PX, colour, figure

_HEIGHT_PX: Final = 420
_MARGINS_PX: Final = (10, 40)
"""Above and below the curves."""
_COLOURS: Final = ("hot", "communication", "compute", "ink")
_PARTS: Final = {
    "goodput": ("bg-floor", "steps that count"),
    "saving": ("bg-data", "saving"),
    "lost": ("bg-hot", "steps done twice"),
    "down": ("bg-open", "waiting for the restart"),
}
_ROWS_APART: Final = 3


def goodput_page(
    curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str, found: Mapping[str, Goodput]
) -> bytes:
    """Where the time goes for each way to recover (`found`), and the goodput of each over the number of devices."""
    names = list(curves)
    devices = [num for num, _ in curves[names[0]]][::_ROWS_APART]
    rows = [[f"{num:,}", *(f"{dict(curves[name])[num]:.1%}" for name in names)] for num in devices]
    return document_page(
        [
            Heading(title, is_title=True),
            _time_chart(found),
            Drawing(goodput_svg(curves), "Goodput by number of devices"),
            Table([Column("devices"), *numbers(*names)], rows),
        ]
    )


def _time_chart(found: Mapping[str, Goodput]) -> Chart:
    """A bar for each way to recover, of what the time goes into."""
    return Chart(
        tuple(
            Bar(
                name=f"{name}, saved every {units.long_duration(one.interval_s)}",
                value=f"{one.goodput:.1%}",
                pieces=tuple(
                    Piece(style, f"{label} {getattr(one, part):.1%}", getattr(one, part))
                    for part, (style, label) in _PARTS.items()
                ),
                fraction=1.0,
                label=f"{name}: "
                + ", ".join(f"{label} {getattr(one, part):.1%}" for part, (_, label) in _PARTS.items()),
            )
            for name, one in found.items()
        ),
        legend=tuple(_PARTS.values()),
        title="Where the time goes",
    )


def goodput_svg(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Markup:
    """The drawing alone: one curve per way to recover, named at its end."""
    with figure("goodput", width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        above, below = _MARGINS_PX
        axes = drawn.axes(left=64, right=240, top=above, bottom=below)
        line_height = 1.3 * SMALL_PX / (_HEIGHT_PX - above - below)
        places = _spread([points[-1][1] for points in curves.values()], line_height)
        for index, ((name, points), place) in enumerate(zip(curves.items(), places, strict=True)):
            xs, ys = zip(*points, strict=True)
            shade = colour(_COLOURS[index % len(_COLOURS)])
            (line,) = axes.plot(xs, ys, color=shade, linewidth=2.0)
            drawn.tip(line, f"{name}: {ys[-1]:.1%} at {xs[-1]:,} devices")
            axes.annotate(f"  {name}, {ys[-1]:.0%}", (xs[-1], place), va="center", color=shade, annotation_clip=False)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        axes.set_xlabel("devices")
        axes.yaxis.set_major_formatter(lambda s, _: f"{s:.0%}")
        axes.grid(axis="y")
        shares = "; ".join(f"{name} {points[-1][1]:.1%}" for name, points in curves.items())
        return drawn.svg(label=f"Goodput at {max(p[-1][0] for p in curves.values()):,} devices: {shares}")


def _spread(heights: Sequence[float], least: float) -> list[float]:
    """Where to write at these heights, in their order, so that no two lines are closer than `least`.

    >>> [round(place, 2) for place in _spread([0.5, 0.0, 0.02], 0.1)]
    [0.5, 0.0, 0.1]
    """
    places, lowest = list(heights), float("-inf")
    for index in sorted(range(len(places)), key=lambda i: heights[i]):
        places[index] = lowest = max(heights[index], lowest + least)
    return places
