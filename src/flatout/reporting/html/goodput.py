"""The share of the time that is kept, by the number of devices, as a page of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

from markupsafe import Markup, escape

from flatout.reporting.html.figure import colour, figure

_WIDTH_PX: Final = 1040
_HEIGHT_PX: Final = 420
_COLOURS: Final = ("hot", "communication", "compute", "ink")


def goodput_page(curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> str:
    """One curve for each way to recover, over the number of devices."""
    style = (files("flatout.reporting.html") / "style.css").read_text(encoding="utf-8")
    return str(
        Markup(
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{title}</title><style>{style}</style></head>"
        ).format(title=title, style=Markup(style))
        + Markup("<body><main><h1>{title}</h1>{svg}</main></body></html>\n").format(
            title=title, svg=goodput_svg(curves)
        )
    )


def goodput_svg(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Markup:
    """The drawing alone."""
    from matplotlib.ticker import FuncFormatter

    with figure("goodput", width_px=_WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        axes = drawn.axes(left=64, right=240, top=10, bottom=40)
        for index, (name, points) in enumerate(curves.items()):
            shade = colour(_COLOURS[index % len(_COLOURS)])
            xs, ys = [num for num, _ in points], [kept for _, kept in points]
            (line,) = axes.plot(xs, ys, color=shade, linewidth=2.0)
            drawn.tip(line, f"{name}: {ys[-1]:.1%} at {xs[-1]:,} devices")
            axes.annotate(
                f" {name}, {ys[-1]:.0%}",
                (xs[-1], ys[-1]),
                color=colour("ink"),
                va="center",
                fontsize=12,
                annotation_clip=False,
            )
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.set_xlabel("devices", color=colour("muted"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{s:.0%}"))
        axes.tick_params(colors=colour("muted"), color=colour("line"), length=4)
        axes.grid(axis="y", color=colour("line"), linewidth=0.8)
        axes.set_axisbelow(True)
        said = "; ".join(f"{escape(name)} {points[-1][1]:.1%}" for name, points in curves.items())
        return drawn.svg(
            label=f"Share of the time that is kept at {max(p[-1][0] for p in curves.values()):,} devices: {said}"
        )
