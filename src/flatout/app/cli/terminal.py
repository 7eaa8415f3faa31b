"""Consoles of the terminal. rich is imported when a command first prints: `flatout --help` and other verbs do not pay for it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.core.files import STANDARD_OUTPUT

if TYPE_CHECKING:
    from rich.console import Console

    from flatout.report.document import Block


def open_console(
    *, stderr: bool = False, soft_wrap: bool = False, highlight: bool = True, markup: bool = True
) -> Console:
    """A rich console on stdout or stderr, with rich's settings of these names."""
    from rich.console import Console

    return Console(stderr=stderr, soft_wrap=soft_wrap, highlight=highlight, markup=markup)


def print_report(blocks: Iterable[Block], *, width: int = 100, stderr: bool = False) -> None:
    """Print a report on stdout or stderr, at most `width` columns wide."""
    from flatout.report.text import terminal_report

    open_console(stderr=stderr).print(terminal_report(blocks, width=width))


def print_lines(*lines: str, stderr: bool = False) -> None:
    """Print each line as it stands: no wrapping, no markup, no colours."""
    console = open_console(stderr=stderr, soft_wrap=True, highlight=False, markup=False)
    for line in lines:
        console.print(line)


def print_unwrapped(blocks: Iterable[Block], *, stderr: bool = False) -> None:
    """Print a report whose lines are never wrapped, so that other programs can read them."""
    from flatout.report.text import plain_lines

    print_lines(*plain_lines(blocks), stderr=stderr)


def print_written(path: Path, *, stderr: bool) -> None:
    """Print where a file is; nothing for standard output, which shows that itself."""
    if path != STANDARD_OUTPUT:
        print_lines(f"written to {path}", stderr=stderr)
