"""What all pages are made with: templates whose text cannot become markup, and one style."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from flatout.core import units
from flatout.report.sanitise import inert

if TYPE_CHECKING:
    from jinja2 import Environment


def rendered_page(
    name: str,
    *,
    sheets: tuple[str, ...] = ("style",),
    filters: Mapping[str, Callable[..., object]] | None = None,
    **values: object,
) -> bytes:
    """Render the template `name`, with these style sheets, as UTF-8: a page that needs no script, no network, no other file."""
    environment = _environment()
    environment.filters.update(filters or {})
    style = Markup("").join(
        Markup(files(__package__).joinpath(f"{one}.css").read_text(encoding="utf-8")) for one in sheets
    )
    page = environment.get_template(f"{name}.html.jinja").render(style=style, **values)
    return page.encode("utf-8", "backslashreplace")


@cache
def _environment() -> Environment:
    """Jinja for this folder's templates: all text goes through autoescape, and is made inert before."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flatout.report", "html"),
        autoescape=True,
        finalize=_safe,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown: tuple[Callable[..., object], ...] = (
        units.duration,
        units.size,
        units.work,
        units.number,
        units.percent,
        units.speedup,
    )
    shown = (*shown, units.work_rate, units.size_rate, with_heads)
    environment.filters.update({one.__name__: one for one in shown})
    return environment


def _safe(value: Any) -> object:
    """What an expression of a template may write: markup of ours as it is, all else inert."""
    if isinstance(value, Markup) or value is None:
        return value if value is not None else ""
    return inert(str(value))


def with_heads(table: Markup) -> Markup:
    """Write the head of its column into each cell, for narrow screens: there a row is a stack of lines, each `head value`."""
    heads = [Markup(head).striptags() for head in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', table, re.DOTALL)]
    rows = re.split(r"(?=<tr)", table)
    return Markup("").join(Markup(row if 'scope="col"' in row else _headed_row(row, heads)) for row in rows)


def _headed_row(row: str, heads: list[str]) -> str:
    """One row with `data-head` in each cell whose column has a head."""
    left = iter(heads)

    def headed(start: re.Match[str]) -> str:
        head = next(left, "")
        if start[0] == "<th" and 'scope="row" class="n"' not in row:
            return start[0]  # the name of the row needs none
        return f'{start[0]} data-head="{escape(head)}"' if head else start[0]

    return re.sub(r"<t[dh](?=[ >])", headed, row.replace("<code></code>", ""))
