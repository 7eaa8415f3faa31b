"""`flatout runs`: what has been run, and what differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command, help_epilog
from flatout.app.cli.terminal import open_console, print_lines

runs = typer.Typer(invoke_without_command=True, help="List recorded runs; `flatout runs diff A B` compares two.")


@runs.callback()
def _listed(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(metavar="DIR", help="The folder that the runs lie in.")] = Path("runs"),
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="Only runs with this in their config, or outcome=failed, device=..., script=..."
        ),
    ] = None,
) -> None:
    """List the runs of a folder, the newest last."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from flatout.blocks.recording.run import runs_in
    from flatout.core.errors import UsageError
    from flatout.core.records.run import RunRecord

    wanted = [tuple(text.partition("=")[::2]) for text in where or []]
    if any(not key or not value for key, value in wanted):
        raise UsageError(f"--where {' '.join(where or [])}: give KEY=VALUE, as lr=0.1 or outcome=failed")

    def is_wanted(record: RunRecord) -> bool:
        known = record.config | {
            "outcome": record.outcome,
            "device": record.surroundings.device,
            "script": " ".join(record.command),
        }
        return all(value in known.get(key, "") if key == "script" else known.get(key) == value for key, value in wanted)

    table = Table("run", "outcome", "steps", "ms a step", "revision", "config", box=None, header_style="dim")
    found = [(path, record) for path, record in runs_in(folder) if is_wanted(record)]
    for path, record in found:
        code = record.code
        table.add_row(
            path.name,
            record.outcome,
            str(record.num_steps),
            f"{record.speed.median_s * 1e3:.2f}" if record.speed is not None else "-",
            (code.revision[:10] or "no git") + ("+" if code.changed or code.untracked else ""),
            ", ".join(f"{k}={v}" for k, v in record.config.items())[:60],
        )
    if found:
        open_console().print(table)
    else:
        print_lines(f"no run in '{folder}'{' that fits' if wanted else ''}")


@runs.command(
    epilog=help_epilog("flatout runs diff runs/a runs/b", "flatout runs diff runs/20261122-101500-train runs/b")
)
def diff(
    one: Annotated[Path, typer.Argument(metavar="A", help="The folder of a run.")],
    two: Annotated[Path, typer.Argument(metavar="B", help="The folder of another.")],
) -> None:
    """Say what differs between two runs: code, packages, threads, settings, configuration, numbers, speed."""
    from flatout.blocks.recording.replay import first_step_difference, reasons_between
    from flatout.blocks.recording.run import read_digests, read_run

    a, b = read_run(one), read_run(two)
    print_lines(*(f"{cause:13} {text}" for cause, text in reasons_between(a, b)))
    difference = first_step_difference(read_digests(one), read_digests(two))
    if difference is not None:
        name = f" {difference.name}" if difference.name else ""
        print_lines(f"numbers       differ from step {difference.step} on: {difference.what}{name}")
    else:
        print_lines("numbers       of the first steps are the same")
    if a.speed is not None and b.speed is not None:
        print_lines(
            f"speed         {a.speed.median_s * 1e3:.2f} ms -> {b.speed.median_s * 1e3:.2f} ms a step "
            f"({b.speed.median_s / a.speed.median_s:.2f} times as long)"
        )


COMMAND = Command(
    runs,
    order=220,
    group="prove",
    examples=("flatout runs", "flatout runs diff runs/20261122-101500-train runs/20261122-113000-train"),
)
