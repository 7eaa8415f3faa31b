"""What all pages are made with: templates whose text cannot become markup, and one style."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING

from markupsafe import Markup

from flatout.reporting.inert import inert

if TYPE_CHECKING:
    from jinja2 import Environment


def environment() -> Environment:
    """For the templates of this folder: all text goes through autoescape, and is made inert before."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("flatout.reporting", "html"),
        autoescape=True,
        finalize=_safe,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def style() -> Markup:
    """The style sheet."""
    return Markup(files(__package__).joinpath("style.css").read_text(encoding="utf-8"))


def _safe(value: object) -> object:
    """What an expression of a template may write: markup of ours as it is, all else inert."""
    if isinstance(value, Markup) or value is None:
        return value if value is not None else ""
    return inert(str(value))
