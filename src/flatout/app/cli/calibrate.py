"""`flatout calibrate`: a minute of measured steps on the devices at hand, for `flatout scale --measured`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import require_writable
from flatout.app.cli.ranks import launch_environment
from flatout.app.cli.terminal import print_lines
from flatout.core.errors import UsageError
from flatout.core.files import STANDARD_OUTPUT, write_whole_file


def calibrate(
    model: Annotated[
        Path, typer.Option(metavar="FILE", help="Sizes of the model, a TOML file, as for `flatout scale`.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Write the measured steps to this file, as JSON.")
    ],
    nproc: Annotated[
        int | None, typer.Option(metavar="N", help="Ranks on this machine. [default: one for each GPU]")
    ] = None,
    seconds: Annotated[float, typer.Option(help="For all steps; the one under way is finished.")] = 60.0,
    device: Annotated[str, typer.Option(help="cuda or cpu. [default: cuda where there is one]")] = "",
) -> None:
    """Measure steps of a few layers of the model in layouts of every kind that fits, for `flatout scale --measured`."""
    import torch

    from flatout.scale.inputs import read_model, read_runs

    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    number = nproc if nproc is not None else torch.cuda.device_count() if kind == "cuda" else 2
    require_writable(out=out)
    if number < 1 or seconds <= 0:
        raise UsageError(f"{number} ranks, {seconds} s: give one rank or more, and seconds above 0")
    read_model(model)
    is_printed = out == STANDARD_OUTPUT
    with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
        file = Path(folder) / "steps.json" if is_printed else out.absolute()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}"]
        command += ["-m", "flatout.app.cli.children.calibration_rank"]
        command += [str(model.absolute()), str(file), f"{seconds}", kind]
        environment = launch_environment(os.environ, number)
        ended = subprocess.run(command, check=False, stdout=2 if is_printed else None, env=environment)
        if ended.returncode:
            rest = "" if is_printed else f"; what was measured before lies in '{out}'"
            raise UsageError(f"the ranks ended with {ended.returncode}{rest}")
        if is_printed:
            write_whole_file(out, file.read_bytes())
        num_steps = len(read_runs(file))
    use = "" if is_printed else f", written to {out}; use them: flatout scale --measured {out}"
    print_lines(f"{num_steps} steps measured on {number} x {kind}{use}", stderr=is_printed)


COMMAND = Command(
    calibrate,
    order=50,
    group="devices",
    examples=(
        "flatout calibrate --model sizes.toml --out steps.json",
        "flatout calibrate --model sizes.toml --out steps.json --nproc 2 --device cpu",
    ),
)
