"""`flatout report`: diagnose Evidence that was captured before, or elsewhere. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flatout.cli.outputs import Outputs
from flatout.errors import RecordError


def report(
    evidence: Annotated[Path, typer.Argument(help="What `flatout check --json` wrote.")],
    json: Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML page to this file.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write a short report for a pull request to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write one step as a trace for Perfetto; .gz packs it.")
    ] = None,
) -> None:
    """Diagnose saved Evidence and print the report."""
    from flatout.reporting.json_report import read_evidence
    from flatout.reporting.text import report as text_report
    from flatout.session import diagnose_all

    outputs = Outputs(json=json, html=html, markdown=markdown, trace=trace)
    outputs.check()
    try:
        data = evidence.read_bytes()
    except OSError as e:
        raise RecordError(f"cannot read '{evidence}': {e.strerror or e}; give the file that --json wrote") from e
    seen = read_evidence(data)
    diagnosis = diagnose_all(seen)
    Console().print(text_report(seen, diagnosis))
    outputs.write(seen, diagnosis)
