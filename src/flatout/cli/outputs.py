"""The files that a report can be written to, the same for every command that reports."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flatout.errors import UsageError
from flatout.records.evidence import Evidence
from flatout.records.finding import Diagnosis
from flatout.records.record import write_file


class Outputs(NamedTuple):
    """What to write where; None leaves it out."""

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    trace: Path | None = None

    def check(self) -> None:
        """Raises UsageError when a folder does not exist, before anything is run in vain."""
        for name, path in self._asdict().items():
            if path is not None and not path.absolute().parent.is_dir():
                raise UsageError(
                    f"--{name} {path}: the folder does not exist; make it first, so that nothing is lost at the end"
                )

    def write(self, evidence: Evidence, diagnosis: Diagnosis) -> None:
        """Write every file that was asked for, each whole or not at all."""
        if self.json is not None:
            from flatout.reporting.json_report import json_report

            write_file(self.json, json_report(evidence, diagnosis))
        if self.html is not None:
            from flatout.reporting.html import html_report

            write_file(self.html, html_report(evidence, diagnosis))
        if self.markdown is not None:
            from flatout.reporting.markdown import markdown_report

            write_file(self.markdown, markdown_report(evidence, diagnosis).encode())
        if self.trace is not None:
            from flatout.reporting.perfetto import chrome_trace

            write_file(self.trace, chrome_trace(evidence, compress=self.trace.suffix == ".gz"))
