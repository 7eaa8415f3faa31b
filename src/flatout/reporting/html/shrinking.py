"""Accuracy against time, each composition a point with its name, as a page of its own."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from markupsafe import Markup, escape

from flatout.records.shrinking import Point, Shrunk
from flatout.reporting import units
from flatout.reporting.html.figure import colour, figure
from flatout.reporting.shrinking import shrunk_lines

_WIDTH_PX: Final = 1040
_HEIGHT_PX: Final = 480


def shrunk_page(found: Shrunk) -> str:
    """The picture, and the table below it."""
    style = (files("flatout.reporting.html") / "style.css").read_text(encoding="utf-8")
    return str(
        Markup(
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{style}</style></head>"
        ).format(title=f"flatout shrink {found.model}", style=Markup(style))
        + Markup("<body><main><h1>{title}</h1>{svg}<pre>{text}</pre></main></body></html>\n").format(
            title=f"What {found.model} can cost", svg=shrunk_svg(found), text="\n".join(shrunk_lines(found))
        )
    )


def shrunk_svg(found: Shrunk) -> Markup:
    """The drawing alone: seconds of a call on a logarithmic axis, the metric upwards where more is better."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    with figure("shrunk", width_px=_WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        axes = drawn.axes(left=72, right=200, top=14, bottom=44)
        floor = found.given.metric + (found.allowed_loss if found.is_cost else -found.allowed_loss)
        line = axes.axhline(floor, color=colour("muted"), linewidth=1, linestyle="--")
        drawn.tip(line, f"{found.allowed_loss:.3g} of the metric may be lost")
        for point in found.points:
            low, high = _range(point, found)
            x = point.call_s[0]
            shade = colour(_shade(point, found))
            axes.plot([x, x], [low, high], color=shade, linewidth=1)
            (mark,) = axes.plot(
                [x], [point.metric], "o", color=shade, markersize=9 if point.name == found.chosen else 6
            )
            drawn.tip(mark, _told(point))
            axes.annotate(
                f"  {point.name}",
                (x, point.metric),
                color=colour("ink"),
                va="center",
                fontsize=12,
                annotation_clip=False,
            )
        axes.set_xscale("log")
        if found.is_cost:
            axes.invert_yaxis()
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: units.duration(s)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(
            "time of a step" if found.objective == "train-cost" else "time of a call", color=colour("muted")
        )
        axes.set_ylabel("metric", color=colour("muted"))
        axes.tick_params(which="both", colors=colour("muted"), color=colour("line"), length=4)
        axes.grid(axis="y", color=colour("line"), linewidth=0.8)
        axes.set_axisbelow(True)
        said = "; ".join(f"{escape(p.name)} {units.duration(p.call_s[0])}, {p.metric:.4g}" for p in found.points)
        return drawn.svg(label=f"Metric against time: {said}")


def _range(point: Point, found: Shrunk) -> tuple[float, float]:
    """The metric less, and more, by the ends of the interval of what it lost."""
    if point.lost_range is None:
        return point.metric, point.metric
    sign = -1 if found.is_cost else 1
    return tuple(found.given.metric - sign * lost for lost in point.lost_range)  # type: ignore[return-value]


def _shade(point: Point, found: Shrunk) -> str:
    if point.name == found.chosen:
        return "hot"
    return "compute" if point.name in found.front else "muted"


def _told(point: Point) -> str:
    lost = "" if point.lost_range is None else f" ({point.lost_range[0]:.3g} .. {point.lost_range[1]:.3g})"
    return (
        f"{point.name}: {units.duration(point.call_s[0])}, {point.faster[0]:.2f}x, {units.size(point.num_bytes)}, "
        f"metric {point.metric:.4g}, lost {point.lost:.3g}{lost}"
    )
