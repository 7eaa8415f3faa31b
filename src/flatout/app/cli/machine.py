"""`flatout machine`: what this machine can do, measured once and kept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import require_writable
from flatout.app.cli.terminal import open_console, print_report


def machine(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if a measurement is stored.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write the record to this file.")
    ] = None,
) -> None:
    """Measure what this machine can do, or show what was measured before, beside the data sheet."""
    # measure imports torch, which takes seconds: other commands must not pay for it.
    from flatout.core.files import STANDARD_OUTPUT, write_whole_file
    from flatout.core.records.hardware import Machine
    from flatout.core.records.record import to_json
    from flatout.core.runtime.cache_folder import default_cache_folder
    from flatout.machine.measure import cache, probe
    from flatout.machine.specs import catalog
    from flatout.report.parts.machine import machine_blocks

    require_writable(json=json)
    notes = open_console(stderr=True)
    identity = probe.identify()

    def measure() -> Machine:
        notes.print("measuring this machine, up to 30 s; it should be idle", style="dim")
        return catalog.identified(probe.measure_machine())

    if refresh:
        measured = measure()
        path, because = cache.write_machine(default_cache_folder(), measured), None
    else:
        measured, path, because = cache.read_or_measure(default_cache_folder(), identity, measure)
    spec = catalog.load_spec(measured.spec_id) if measured.spec_id else None
    print_report(machine_blocks(measured, spec), width=200, stderr=json == STANDARD_OUTPUT)
    if because is not None:
        notes.print(f"measured now: {because}", style="dim")
    notes.print(f"stored in {path}", style="dim")
    if json is not None:
        write_whole_file(json, to_json(measured))


COMMAND = Command(
    machine,
    order=20,
    group="find",
    examples=("flatout machine", "flatout machine --refresh --json machine.json"),
)
