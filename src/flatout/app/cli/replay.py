"""`flatout replay`: a recorded run again, its first steps compared bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import require_writable
from flatout.app.cli.terminal import print_lines

_WORDS = {
    "inputs": "what the model is given",
    "loss": "the loss",
    "gradient": "the gradient of {}",
    "weight": "the weight {}",
    "end": "the run ends earlier",
}


def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, as runs/20261122-101500-train.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare; no more than the run has recorded.")] = 8,
    here: Annotated[bool, typer.Option("--here", help="With the code and variables as they are now.")] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write what was found to this file.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds the script may take to come so far.")] = 600.0,
) -> None:
    """Run the first steps of a recorded run again, on its code rebuilt beside yours, and compare every bit.

    Exits with 0 when they are equal, and with 1 when not: then the first step and tensor that differ are named, with the likely
    cause.
    """
    from json import dumps

    from flatout.blocks.recording.replay import replay as again
    from flatout.core.files import STANDARD_OUTPUT, write_whole_file

    require_writable(json=json)
    found = again(run, num_steps=steps, is_here=here, timeout_s=timeout)
    takes_stdout = json == STANDARD_OUTPUT
    if found.difference is None:
        equal = f"EQUAL: {found.num_steps} steps; inputs, losses, gradients and weights are the same bit by bit"
        print_lines(equal, stderr=takes_stdout)
    else:
        step, what, name = found.difference
        reasons = enumerate(found.reasons)
        print_lines(
            f"DIFFERENT: step {step}: {_WORDS[what].format(name)}",
            *(f"  {'likely' if not number else 'also  '}  {cause}: {reason}" for number, (cause, reason) in reasons),
            stderr=takes_stdout,
        )
    if json is not None:
        record = found._asdict() | {"difference": found.difference and found.difference._asdict()}
        write_whole_file(json, f"{dumps(record, indent=1)}\n".encode())
    raise typer.Exit(0 if found.difference is None else 1)


COMMAND = Command(
    replay,
    order=200,
    group="prove",
    examples=("flatout replay runs/20261122-101500-train", "flatout replay --steps 20 runs/20261122-101500-train"),
)
