"""The files that a report is written to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flatout.core.files import STANDARD_OUTPUT, is_stream

if TYPE_CHECKING:
    from flatout.core.records.evidence import Evidence
    from flatout.core.records.finding import Diagnosis


class Outputs(NamedTuple):
    """What to write where; None leaves it out, `-` is standard output."""

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    trace: Path | None = None

    @property
    def take_stdout(self) -> bool:
        """Whether a file goes to standard output, so that all else has to go to standard error."""
        return STANDARD_OUTPUT in self

    def write(self, evidence: Evidence, diagnosis: Diagnosis) -> None:
        """Write every file that was asked for, each whole or not at all.

        Raises RecordError when some could not be written, after all others were.
        """
        from flatout.core.files import write_all_files

        def json() -> bytes:
            from flatout.report.json_report import json_report

            return json_report(evidence, diagnosis)

        def html() -> bytes:
            from flatout.report.html import html_report

            return html_report(evidence, diagnosis)

        def markdown() -> bytes:
            from flatout.report.markdown import markdown_report
            from flatout.report.parts.diagnosis import short_diagnosis_blocks

            return markdown_report(short_diagnosis_blocks(evidence, diagnosis)).encode()

        def trace() -> bytes:
            from flatout.report.perfetto import chrome_trace

            return chrome_trace(evidence, compress=self.trace is not None and self.trace.suffix == ".gz")

        contents = zip(self, (json, html, markdown, trace), strict=True)
        write_all_files((path, content) for path, content in contents if path is not None)


def why_not_writable(path: Path, target: Path) -> str:
    """Why nothing can be written to a path that leads to this target; '' where it can."""
    if path == STANDARD_OUTPUT:
        return ""
    if is_stream(path):
        return "" if os.access(path, os.W_OK) else "it may not be written to; give another path"
    folder = target.parent
    if not folder.is_dir():
        return f"there is no folder '{folder}'; give a path in one that exists"
    if target.is_dir():
        return "it is a folder; give the path of a file in it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder '{folder}' may not be written to; give a path in another one"
    return ""
