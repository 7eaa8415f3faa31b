"""Any report as a part of another page, such as a notebook: every kind of block, in the colours of the pages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Final

from markupsafe import Markup

from flatout.report.bars import phase_label, phases_in_order
from flatout.report.document import Block
from flatout.report.html.code import edit, excerpt
from flatout.report.html.document import kind_of_block
from flatout.report.html.figure import PHASES
from flatout.report.html.template import rendered_page

_COLOURS: Final = re.compile(r":root \{\s*(.*?)\s*\}", re.DOTALL)
"""The sets of colours in the style of a page: for light, for dark, for paper."""
_HOSTS_LIGHT: Final = ('[data-jp-theme-light="true"]', ".vscode-light", 'html[theme="light"]')
_HOSTS_DARK: Final = ('[data-jp-theme-light="false"]', ".vscode-dark", ".vscode-high-contrast", 'html[theme="dark"]')
"""How JupyterLab, Visual Studio Code and Colab say which theme they show; elsewhere the system's is taken."""


def html_fragment(blocks: Iterable[Block]) -> str:
    """One HTML element for all blocks, light or dark as the page around it is; it runs no script and loads nothing."""
    return rendered_page(
        "fragment",
        sheets=("fragment",),
        filters={
            "kind": kind_of_block,
            "excerpt": excerpt,
            "edit": edit,
            "phase": phase_label,
            "phase_class": lambda name: name if name in PHASES else "other",
            "in_order": lambda seconds: list(phases_in_order(seconds).items()),
        },
        blocks=list(blocks),
        colours=_colours(),
    ).decode()


@cache
def _colours() -> Markup:
    """The colours of the pages for this element, by the theme of the page around it."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    light, dark = (found.group(1) for found in list(_COLOURS.finditer(style))[:2])
    scope = ".flatout-report"

    def within(hosts: tuple[str, ...], colours: str, scheme: str) -> str:
        return f"{', '.join(f'{host} {scope}' for host in hosts)} {{ color-scheme: {scheme}; {colours} }}"

    return Markup(
        "\n".join(
            (
                f"{scope} {{ color-scheme: light; {light} }}",
                f"@media (prefers-color-scheme: dark) {{ {scope} {{ color-scheme: dark; {dark} }} }}",
                within(_HOSTS_LIGHT, light, "light"),
                within(_HOSTS_DARK, dark, "dark"),
            )
        )
    )
