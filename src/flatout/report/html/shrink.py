"""Accuracy against time, each composition a point with its name, as a page of its own."""

from __future__ import annotations

from typing import Final

from markupsafe import Markup

from flatout.core import units
from flatout.core.records.shrink import Point, Shrunk
from flatout.report.document import Drawing, Heading
from flatout.report.html.document import document_page
from flatout.report.html.figure import WIDTH_PX, colour, figure
from flatout.report.parts.shrink import shrunk_blocks

_HEIGHT_PX: Final = 480


def shrunk_page(found: Shrunk) -> bytes:
    """The picture, and the table below it."""
    title = Heading(f"What {found.model} can cost", is_title=True)
    return document_page([title, Drawing(shrunk_svg(found), "Accuracy against time"), *shrunk_blocks(found)])


def shrunk_svg(found: Shrunk) -> Markup:
    """The drawing alone: seconds of a call on a logarithmic axis, the metric upwards where more is better."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    with figure("shrunk", width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        axes = drawn.axes(left=72, right=200, top=14, bottom=44)
        floor = found.original.metric + (found.allowed_loss if found.is_cost else -found.allowed_loss)
        line = axes.axhline(floor, color=colour("muted"), linewidth=1, linestyle="--")
        drawn.tip(line, f"{found.allowed_loss:.3g} of the metric may be lost")
        for point in found.points:
            low, high = _range(point, found)
            x, shade = point.call_s[0], colour(_shade(point, found))
            axes.plot([x, x], [low, high], color=shade, linewidth=1)
            size = 9 if point.name == found.selected else 6
            (marker,) = axes.plot([x], [point.metric], "o", color=shade, markersize=size)
            drawn.tip(marker, _tip_text(point))
            axes.annotate(f"  {point.name}", (x, point.metric), va="center", annotation_clip=False)
        axes.set_xscale("log")
        if found.is_cost:
            axes.invert_yaxis()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: units.duration(s)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("time of a step" if found.objective == "train-cost" else "time of a call")
        axes.set_ylabel("metric")
        axes.grid(axis="y")
        label = "; ".join(f"{p.name} {units.duration(p.call_s[0])}, {p.metric:.4g}" for p in found.points)
        return drawn.svg(label=f"Metric against time: {label}")


def _range(point: Point, found: Shrunk) -> tuple[float, float]:
    """The metric less, and more, by the ends of the interval of what it lost."""
    if point.lost_range is None:
        return point.metric, point.metric
    sign = -1 if found.is_cost else 1
    return tuple(found.original.metric - sign * lost for lost in point.lost_range)  # type: ignore[return-value]


def _shade(point: Point, found: Shrunk) -> str:
    if point.name == found.selected:
        return "hot"
    return "compute" if point.name in found.pareto else "muted"


def _tip_text(point: Point) -> str:
    lost = "" if point.lost_range is None else f" ({point.lost_range[0]:.3g} .. {point.lost_range[1]:.3g})"
    return (
        f"{point.name}: {units.duration(point.call_s[0])}, {point.faster[0]:.2f}x, {units.size(point.num_bytes)}, "
        f"metric {point.metric:.4g}, lost {point.lost:.3g}{lost}"
    )
