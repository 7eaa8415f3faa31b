"""`flatout machine`: what this machine can do, measured once and kept."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def machine(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if a measurement is kept.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the record to this file.")] = None,
) -> None:
    """Measure what this machine can do, or show what is kept, beside the data sheet."""
    # measure imports torch, which takes seconds: other commands must not pay for it.
    from flatout.hardware import catalog
    from flatout.measure import cache, probe
    from flatout.records.hardware import Machine
    from flatout.records.record import to_json, write_file
    from flatout.reporting.machine import machine_text

    console, notes = Console(), Console(stderr=True)
    identity = probe.identify()

    def measure() -> Machine:
        notes.print("measuring this machine, up to 30 s; it should be idle", style="dim")
        return catalog.identified(probe.measure_machine())

    if refresh:
        measured = measure()
        path, because = cache.write(cache_folder(), measured), None
    else:
        measured, path, because = cache.read_or_measure(cache_folder(), identity, measure)
    console.print(machine_text(measured, catalog.load(measured.spec_id) if measured.spec_id else None))
    if because is not None:
        notes.print(f"measured now: {because}", style="dim")
    notes.print(f"kept in {path}", style="dim")
    if json is not None:
        write_file(json, to_json(measured))


def cache_folder() -> Path:
    """Where flatout keeps what it has measured: $XDG_CACHE_HOME/flatout, or ~/.cache/flatout."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG base directory specification (0.8): a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "flatout"
