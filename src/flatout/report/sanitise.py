"""Text that came from a script, made safe to show: no markup, no escape sequences, no invisible characters."""

from __future__ import annotations

import re
import unicodedata
from typing import Final, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text

from flatout.core.records.workload import CELL, PACKAGE_FOLDERS, Source, short_place

_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
_LONGEST: Final = 2000
"""Characters of one piece of text that are shown; a generated line of source can be megabytes long."""
_LONGEST_PLACE: Final = 40
"""Columns that a place in a file takes at most beside other columns of a table."""


def inert(text: str, *, ascii_only: bool = False) -> str:
    """One line of `text` that a terminal cannot mistake for anything but text.

    Escape sequences, control characters and invisible ones (which can reorder what is read) are dropped, white space
    becomes single spaces, lone surrogates and, if `ascii_only`, all that is not ASCII are written as escapes.

    >>> inert("a\\x1b[31m red\\tline\\u202e")
    'a red line'
    """
    text = _visible(" ".join(_without_escapes(text).split()), "Cc", "Cf")
    return text.encode("ascii" if ascii_only else "utf-8", "backslashreplace").decode()


def inert_code(text: str) -> str:
    """`text` as `inert` makes it, but with its blanks as they stand, tabs as four: one line of source.

    >>> inert_code("\\tif x:  # \u202etxet")
    '    if x:  # txet'
    """
    text = _visible(_without_escapes(text).expandtabs(4), "Cc", "Cf", "Zl", "Zp")
    return text.rstrip().encode("utf-8", "backslashreplace").decode()


def _without_escapes(text: str) -> str:
    return _ESCAPES.sub("", text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")


def _visible(text: str, *hidden: str) -> str:
    """The text without characters of these categories."""
    return "".join(c for c in text if unicodedata.category(c) not in hidden)


def place(file: str, line: int, *, cwd: str) -> str:
    """'file:line', the file relative to `cwd` when it lies inside, or to the folder of installed packages.

    A notebook's cell by its name alone: 'cell 3, line 5'. '' when there is no line to name.
    """
    if not file:
        return ""
    name = file.replace("\\", "/").rpartition("/")[2]
    if CELL.fullmatch(name):
        return short_place(file, line) if line > 0 else name
    for separator in ("/", "\\"):
        inside = cwd.rstrip(separator) + separator
        if cwd and file.startswith(inside):
            file = file[len(inside) :]
            break
    else:
        for folder in PACKAGE_FOLDERS:
            file = file.rpartition(f"{folder}/")[2]
    return f"{inert(file)}:{line}" if line > 0 else inert(file)


def place_of(source: Source | None, *, cwd: str) -> str:
    """The place of a source line, '' for None."""
    return place(source.file, source.line, cwd=cwd) if source else ""


class CodeText(NamedTuple):
    """One line of Python, highlighted, cut at the width there is."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = inert(self.text, ascii_only=options.ascii_only)
        text = Syntax("", "python", theme="ansi_dark", background_color="default").highlight(code)
        text.rstrip()
        text.no_wrap = True
        if cell_len(text.plain) > options.max_width:
            ellipsis = _ellipsis(options)
            text.truncate(max(1, options.max_width - cell_len(ellipsis)), overflow="crop")
            text.append(ellipsis, style="dim")
        yield text


class Path(NamedTuple):
    """A place in a file that loses its beginning, not its end, when there is no room."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        length = cell_len(self.text)
        return Measurement(min(16, length), min(_LONGEST_PLACE, length))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = inert(self.text, ascii_only=options.ascii_only)
        if cell_len(shown) > options.max_width:
            ellipsis = _ellipsis(options)
            while shown and cell_len(shown) + len(ellipsis) > options.max_width:
                shown = shown[1:]
            shown = ellipsis + shown
        yield Segment(shown, Style.parse("cyan"))
        yield Segment.line()


class Words(NamedTuple):
    """Prose that may quote the script, wrapped at the width there is; `style` is one of rich, of which Markdown keeps 'bold'."""

    text: str
    style: str = ""

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Text(inert(self.text, ascii_only=options.ascii_only)).__rich_measure__(console, options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(inert(self.text, ascii_only=options.ascii_only), style=self.style, overflow="fold")


def _ellipsis(options: ConsoleOptions) -> str:
    return "..." if options.ascii_only else "\u2026"
