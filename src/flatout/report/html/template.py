"""What all pages are made with: templates whose text cannot become markup, and one style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

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
    shown = (units.duration, units.size, units.work, units.number, units.percent, units.speedup)
    environment.filters.update({one.__name__: one for one in (*shown, units.work_rate, units.size_rate)})
    return environment


def _safe(value: Any) -> object:
    """What an expression of a template may write: markup of ours as it is, all else inert."""
    if isinstance(value, Markup) or value is None:
        return value if value is not None else ""
    return inert(str(value))
