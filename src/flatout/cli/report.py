"""`flatout report`: diagnose Evidence, or a trace of torch.profiler, that was captured before or elsewhere. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flatout.cli.outputs import Outputs


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="What `flatout check --json` wrote, or traces of torch.profiler (.json[.gz]): one a rank, or their folder.",
        ),
    ],
    json: Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML page to this file.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write a short report for a pull request to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write one step as a trace for Perfetto; .gz packs it.")
    ] = None,
) -> None:
    """Diagnose saved Evidence, or traces that torch.profiler exported, and print the report."""
    from flatout.reporting.text import report as text_report
    from flatout.session import diagnose_all, evidence_in

    outputs = Outputs(json=json, html=html, markdown=markdown, trace=trace)
    outputs.check()
    seen = evidence_in(files)
    diagnosis = diagnose_all(seen)
    Console().print(text_report(seen, diagnosis))
    outputs.write(seen, diagnosis)
