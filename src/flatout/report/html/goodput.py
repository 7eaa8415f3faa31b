"""The share of the time that is kept, by the number of devices, as a page of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup

from flatout.report.document import Drawing, Heading
from flatout.report.html.document import document_page
from flatout.report.html.figure import WIDTH_PX, colour, figure

_HEIGHT_PX: Final = 420
_COLOURS: Final = ("hot", "communication", "compute", "ink")


def goodput_page(curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str) -> bytes:
    """One curve for each way to recover, over the number of devices."""
    return document_page([Heading(title, is_title=True), Drawing(goodput_svg(curves), "Kept time by devices")])


def goodput_svg(curves: Mapping[str, Sequence[tuple[int, float]]]) -> Markup:
    """The drawing alone: one curve per way to recover, named at its end."""
    with figure("goodput", width_px=WIDTH_PX, height_px=_HEIGHT_PX) as drawn:
        axes = drawn.axes(left=64, right=240, top=10, bottom=40)
        for index, (name, points) in enumerate(curves.items()):
            xs, ys = zip(*points, strict=True)
            (line,) = axes.plot(xs, ys, color=colour(_COLOURS[index % len(_COLOURS)]), linewidth=2.0)
            drawn.tip(line, f"{name}: {ys[-1]:.1%} at {xs[-1]:,} devices")
            axes.annotate(f" {name}, {ys[-1]:.0%}", (xs[-1], ys[-1]), va="center", annotation_clip=False)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1)
        axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        axes.set_xlabel("devices")
        axes.yaxis.set_major_formatter(lambda s, _: f"{s:.0%}")
        axes.grid(axis="y")
        shares = "; ".join(f"{name} {points[-1][1]:.1%}" for name, points in curves.items())
        return drawn.svg(
            label=f"Share of the time that is kept at {max(p[-1][0] for p in curves.values()):,} devices: {shares}"
        )
