"""`flatout report`: diagnose Evidence, or a trace of torch.profiler, that was captured before or elsewhere. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="What `flatout check --json` wrote, or traces of torch.profiler (.json[.gz]): one a rank, or their folder.",
        ),
    ],
    json: Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")] = None,
) -> None:
    """Diagnose saved Evidence, or traces that torch.profiler exported, and print the report."""
    from flatout.records.record import write_file
    from flatout.reporting.json_report import json_report
    from flatout.reporting.text import report as text_report
    from flatout.session import diagnose_all, evidence_in

    seen = evidence_in(files)
    diagnosis = diagnose_all(seen)
    Console().print(text_report(seen, diagnosis))
    if json is not None:
        write_file(json, json_report(seen, diagnosis))
