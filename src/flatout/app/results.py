"""Results of verbs called from Python: they print themselves in a terminal, draw themselves in a notebook, save themselves."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from flatout.core.errors import UsageError, explained
from flatout.core.files import write_whole_file
from flatout.report.document import Block
from flatout.report.text import plain_text


class ReportedResult(ABC):
    """A result that is one report: shown where it is the last value of a cell or is printed, and written by `save`."""

    width: ClassVar[int] = 100
    """Columns of the report as text, at most."""

    @abstractmethod
    def blocks(self) -> list[Block]:
        """The whole report, in the order of reading."""

    @abstractmethod
    def page(self) -> bytes:
        """The report as an HTML file (UTF-8) of its own."""

    @abstractmethod
    def record_json(self) -> bytes:
        """What was found as indented JSON (UTF-8), as the verb's `--json` writes it."""

    @abstractmethod
    def short_blocks(self) -> list[Block]:
        """The report as a notebook or a pull request shows it, with what is less read folded away."""

    def html(self) -> str:
        """The report as a page of its own, which runs no script, loads nothing and needs no other file.

        Raises UsageError when what draws its figures is not installed.
        """
        try:
            return self.page().decode()
        except ModuleNotFoundError as e:
            raise explained(e) from e

    def json(self) -> str:
        """What was found as indented JSON, as the verb's `--json` writes it."""
        return self.record_json().decode()

    def markdown(self) -> str:
        """The report in Markdown, for a pull request."""
        from flatout.report.markdown import markdown_report

        return markdown_report(self.short_blocks())

    def text(self) -> str:
        """The report as plain text, which ends in a line end."""
        return plain_text(self.blocks(), width=self.width)

    def save(self, path: str | Path) -> None:
        """Write the report to a file, whole or not at all, in the format of its suffix: .json, .html, .md or .txt.

        Raises:
            UsageError: The path has another suffix, or what draws a page's figures is not installed.
            RecordError: The file cannot be written.
        """
        path = Path(path)
        formats: dict[str, Callable[[], str]] = {
            ".json": self.json,
            ".html": self.html,
            ".md": self.markdown,
            ".txt": self.text,
        }
        if path.suffix not in formats:
            ending = f"ends in '{path.suffix}'" if path.suffix else "has no suffix"
            raise UsageError(f"'{path}' {ending}, which names no format; end it in one of {', '.join(formats)}")
        write_whole_file(path, formats[path.suffix]().encode("utf-8", "backslashreplace"))

    def __str__(self) -> str:
        columns = shutil.get_terminal_size((self.width, 24)).columns
        return plain_text(self.blocks(), width=min(self.width, columns or self.width)).rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """What Jupyter shows of it: a part of a page, with a style that touches nothing else there."""
        from flatout.report.html.fragment import html_fragment

        return html_fragment(self.short_blocks())
