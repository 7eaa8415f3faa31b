"""`flatout report`: diagnose Evidence that was captured before, or elsewhere. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flatout.errors import RecordError


def report(
    evidence: Annotated[
        list[Path],
        typer.Argument(help="What `flatout check --json` wrote; several ranks' files, or their folder, are merged."),
    ],
    json: Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")] = None,
) -> None:
    """Diagnose saved Evidence and print the report."""
    from flatout.merging import merge
    from flatout.records.record import write_file
    from flatout.reporting.json_report import json_report, read_evidence
    from flatout.reporting.text import report as text_report
    from flatout.session import diagnose_all

    found = [read_evidence(_read(path)) for path in _files(evidence)]
    seen = found[0] if len(found) == 1 else merge(found)
    diagnosis = diagnose_all(seen)
    Console().print(text_report(seen, diagnosis))
    if json is not None:
        write_file(json, json_report(seen, diagnosis))


def _files(paths: list[Path]) -> list[Path]:
    """The files themselves, and those in folders."""
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise RecordError(f"'{path}' holds no .json file; give the folder that the ranks' reports were written to")
        files += inside
    return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise RecordError(f"cannot read '{path}': {e.strerror or e}; give the file that --json wrote") from e
