"""`flatout report`: diagnose Evidence, or a trace of torch.profiler, that was captured before or elsewhere. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import EvidenceJson, ReportHtml, ReportMarkdown, StepTrace, require_writable
from flatout.app.cli.terminal import print_report
from flatout.app.outputs import Outputs


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="What `flatout check --json` wrote, or traces of torch.profiler (.json[.gz]): one a rank, or their folder.",
        ),
    ],
    json: EvidenceJson = None,
    html: ReportHtml = None,
    markdown: ReportMarkdown = None,
    trace: StepTrace = None,
) -> None:
    """Diagnose saved Evidence, or traces that torch.profiler exported, and print the report."""
    from flatout.app.session import diagnose_all, evidence_in
    from flatout.report.parts.diagnosis import diagnosis_blocks

    outputs = Outputs(json=json, html=html, markdown=markdown, trace=trace)
    require_writable(**outputs._asdict())
    evidence = evidence_in(files)
    diagnosis = diagnose_all(evidence)
    print_report(diagnosis_blocks(evidence, diagnosis), stderr=outputs.take_stdout)
    outputs.write(evidence, diagnosis)


COMMAND = Command(
    report,
    order=100,
    group="find",
    examples=("flatout report report.json --html report.html", "flatout report traces/"),
)
