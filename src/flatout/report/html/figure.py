"""Figures as inline SVG: drawn by matplotlib, coloured by the page's CSS variables, with a tooltip on each mark.

One unit of a figure is one CSS pixel at its full width. A colour is drawn as a placeholder and becomes `var(--name)`, so that
one drawing serves light and dark. matplotlib takes half a second to import, so that is done when the first figure is made.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final
from xml.etree import ElementTree

from markupsafe import Markup

from flatout.report.sanitise import inert

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

WIDTH_PX: Final = 1040
"""Width of a figure that is as wide as the page."""
SMALL_PX: Final = 12
"""Size of the letters in a figure."""
PHASES: Final = (
    "data",
    "transfer",
    "environment",
    "rollout",
    "no_grad",
    "forward",
    "backward",
    "optimizer",
    "evaluation",
    "compile",
    "other",
)
"""The phases that have a colour of their own."""
_COLOURS: Final = (
    *("ink", "muted", "line", "panel", "paper", "hot", "on-hot", "op", "accent"),
    *PHASES,
    *("compute", "bandwidth", "overhead", "input", "communication", "capacity", "on-phase"),
)
_PLACEHOLDER: Final = re.compile(r"#fab([0-9a-f]{3})")
_SVG: Final = "http://www.w3.org/2000/svg"
_LINK: Final = "{http://www.w3.org/1999/xlink}href"
_LETTER_SHARE: Final = 0.56
"""Mean width of a letter over its height in the system's sans-serif fonts, rounded up."""


def colour(name: str) -> str:
    """What to draw with, so that the page shows it in its colour of that name.

    >>> colour("ink"), colour("muted")
    ('#fab000', '#fab001')
    """
    return f"#fab{_COLOURS.index(name):03x}"


def phase_colour(phase: str) -> str:
    """The colour of a phase; a phase that nobody knows looks like other host work."""
    return colour(phase if phase in PHASES else "other")


def letters_px(text: str, size_px: float = SMALL_PX) -> float:
    """About how wide `text` will be: the browser's font is not known here."""
    return _LETTER_SHARE * size_px * len(text)


def fitting(text: str, room_px: float, *, longer: str = "", size_px: float = SMALL_PX) -> str:
    """`longer` if it fits in the room there is, else `text`, cut if need be; '' when not even five letters of it fit."""
    for whole in (longer, text):
        if whole and letters_px(whole, size_px) <= room_px:
            return whole
    num = int(room_px / (_LETTER_SHARE * size_px)) - 1
    return f"{text[:num]}\u2026" if num >= 5 else ""


def rounded(shown: str) -> str:
    """A quantity without zeros that say nothing, for axes.

    >>> rounded("20.0 GB/s"), rounded("1.50 ms"), rounded("100 B")
    ('20 GB/s', '1.5 ms', '100 B')
    """
    number, blank, unit = shown.partition(" ")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + blank + unit


class PageFigure:
    """A drawing in progress, `width_px` by `height_px`. Make it with `figure`, which sets matplotlib up for it."""

    def __init__(self, name: str, *, width_px: float, height_px: float) -> None:
        from matplotlib.figure import Figure as Drawing

        self.name = name
        self.width_px = width_px
        self.height_px = height_px
        self.drawing: Drawing = Drawing(figsize=(width_px / 72, height_px / 72), dpi=72, frameon=False)
        self._tips: dict[str, str] = {}

    def axes(self, *, left: float, right: float, top: float, bottom: float) -> Axes:
        """Axes with these margins in pixels, without frame and background."""
        width = (self.width_px - left - right) / self.width_px
        height = (self.height_px - top - bottom) / self.height_px
        axes = self.drawing.add_axes((left / self.width_px, bottom / self.height_px, width, height))
        axes.patch.set_visible(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes

    def bar(
        self,
        axes: Axes,
        left: float,
        bottom: float,
        width: float,
        height: float,
        *,
        fill: str,
        tip: str = "",
        wait: bool = False,
    ) -> None:
        """A bar in the axes' own units, with a tooltip unless it is ''; hatched where something waits."""
        from matplotlib.patches import Rectangle

        shape = Rectangle(
            (left, bottom),
            width,
            height,
            facecolor=fill,
            edgecolor=colour("paper") if wait else "none",
            hatch="//" if wait else None,
            linewidth=0,
            clip_on=False,
        )
        axes.add_artist(shape)  # add_patch would follow the data's limits, which are set: half of the time
        if tip:
            self.tip(shape, tip)

    def inscribe(
        self,
        axes: Axes,
        left: float,
        bottom: float,
        width: float,
        height: float,
        text: str,
        *,
        longer: str = "",
        ink: str = "on-phase",
        ground: str | None = None,
        size_px: float = SMALL_PX,
    ) -> None:
        """Write `text`, or `longer`, into a bar in the axes' own units, as far as it fits; on a `ground` of its own or none."""
        low, high = axes.get_xlim()
        room_px = width / (high - low) * axes.get_position().width * self.width_px - 10
        axes.text(
            left + width / 2,
            bottom + height / 2,
            fitting(text, room_px, longer=longer, size_px=size_px),
            ha="center",
            va="center",
            color=colour(ink),
            fontsize=size_px,
            fontweight="bold" if ink == "on-phase" else "normal",
            bbox={"facecolor": ground, "edgecolor": "none", "pad": 3} if ground is not None else None,
        )

    def tip(self, shape: Artist, text: str) -> None:
        """Show `text` while the pointer rests on `shape`."""
        name = f"tip{len(self._tips)}"
        shape.set_gid(name)
        self._tips[name] = inert(text)

    def svg(self, *, label: str) -> Markup:
        """The finished figure; `label` says in a sentence what it shows, for those who cannot see it."""
        raw = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.drawing.savefig(raw, format="svg", metadata=nothing)
        root = ElementTree.fromstring(raw.getvalue())
        for junk in ("metadata", "defs"):
            for element in root.findall(f"{{{_SVG}}}{junk}"):
                if not element.findall(f".//{{{_SVG}}}pattern") and not element.findall(f".//{{{_SVG}}}clipPath"):
                    root.remove(element)
        self._finish(root)
        width, height = round(self.width_px), round(self.height_px)
        root.attrib.clear()
        root.attrib.update(
            {
                "viewBox": f"0 0 {width} {height}",
                "role": "img",
                "aria-label": inert(label),
                "class": f"figure {self.name}",
            }
        )
        ElementTree.register_namespace("", _SVG)
        text = ElementTree.tostring(root, encoding="unicode")
        # All that the script can name went through matplotlib and ElementTree as text, and both escape it.
        return Markup(re.sub(r">\s+<", "><", text))

    def _finish(self, root: ElementTree.Element) -> None:
        """Colours to variables, fonts to the page's, ids to ones of their own, tooltips in."""
        used = {e.get(_LINK, "").removeprefix("#") for e in root.iter()}
        for element in root.iter():
            style = element.get("style")
            if style is not None:
                style = _PLACEHOLDER.sub(_variable, style)
                style = re.sub(r"font-family:[^;]*;?|stroke-linejoin:[^;]*;?|stroke-miterlimit:[^;]*;?", "", style)
                style = re.sub(r"url\(#", f"url(#{self.name}-", style)
                element.set("style", re.sub(r"\s*([;:])\s*", r"\1", style).strip("; "))
            for key in ("fill", "stroke", "clip-path"):  # a hatch keeps its colours in attributes
                if key in element.attrib:
                    value = _PLACEHOLDER.sub(_variable, element.attrib[key])
                    element.set(key, value.replace("url(#", f"url(#{self.name}-"))
            if element.get("transform", "").startswith("rotate(-0 "):
                del element.attrib["transform"]
            if "d" in element.attrib:
                element.set("d", " ".join(element.attrib["d"].split()))
            name = element.attrib.pop("id", "")
            if name in self._tips:
                tip = ElementTree.Element(f"{{{_SVG}}}title")
                tip.text = self._tips[name]
                element.insert(0, tip)
            elif name and (name in used or element.tag in (f"{{{_SVG}}}clipPath", f"{{{_SVG}}}pattern")):
                element.set("id", f"{self.name}-{name}")
            if _LINK in element.attrib:  # href without xlink is what HTML's SVG wants
                element.set("href", f"#{self.name}-{element.attrib.pop(_LINK)[1:]}")


def _variable(placeholder: re.Match[str]) -> str:
    index = int(placeholder[1], 16)
    return f"var(--{_COLOURS[index]})" if index < len(_COLOURS) else placeholder[0]


@contextmanager
def figure(name: str, *, width_px: float, height_px: float) -> Iterator[PageFigure]:
    """A figure to draw in; `name` is a word that no other figure of the page has."""
    import matplotlib

    # It warns of letters that its own font lacks, and of axes without an extent: all is well.
    with matplotlib.rc_context(), warnings.catch_warnings(action="ignore"):
        matplotlib.rcdefaults()  # nothing of the user's own settings
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "flatout",
                "text.parse_math": False,
                "font.size": SMALL_PX,
                "text.color": colour("ink"),
                "hatch.linewidth": 1.2,
                "axes.unicode_minus": False,
                "axes.labelcolor": colour("muted"),
                "axes.titlecolor": colour("muted"),
                "axes.axisbelow": True,
                "grid.color": colour("line"),
                "grid.linewidth": 0.8,
                "xtick.color": colour("line"),
                "xtick.labelcolor": colour("muted"),
                "xtick.major.size": 4,
                "ytick.color": colour("line"),
                "ytick.labelcolor": colour("muted"),
                "ytick.major.size": 4,
            }
        )
        yield PageFigure(name, width_px=width_px, height_px=height_px)
