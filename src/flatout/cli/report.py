"""`flatout report`: diagnose Evidence that was captured before, or elsewhere. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flatout.errors import RecordError


def report(
    evidence: Annotated[Path, typer.Argument(help="What `flatout check --json` wrote.")],
    json: Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")] = None,
) -> None:
    """Diagnose saved Evidence and print the report."""
    from flatout.records.record import write_file
    from flatout.reporting.json_report import json_report, read_evidence
    from flatout.reporting.text import report as text_report
    from flatout.session import diagnose_all

    try:
        data = evidence.read_bytes()
    except OSError as e:
        raise RecordError(f"cannot read '{evidence}': {e.strerror or e}; give the file that --json wrote") from e
    seen = read_evidence(data)
    diagnosis = diagnose_all(seen)
    Console().print(text_report(seen, diagnosis))
    if json is not None:
        write_file(json, json_report(seen, diagnosis))
