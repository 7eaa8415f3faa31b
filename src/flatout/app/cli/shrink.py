"""`flatout shrink`: the cheapest model that keeps its metric, out of what reductions make of the one that is there."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import require_folder_to_write
from flatout.app.cli.terminal import open_console, print_lines, print_unwrapped
from flatout.app.option_values import one_of, parsed_seconds
from flatout.core.errors import PlanError, UsageError

if TYPE_CHECKING:
    from flatout.core.records.shrink import Shrunk


def shrink(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Returns the trained module, example inputs of one call, names of carried state.",
        ),
    ],
    metric: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Takes what is called like the model; returns a number, or one a sample."
        ),
    ],
    data: Annotated[
        str,
        typer.Option(metavar="MODULE:FUNCTION", help="Returns batches to train and calibrate on: (inputs, targets)."),
    ] = "",
    loss: Annotated[
        str,
        typer.Option(
            metavar="MODULE:FUNCTION", help="Of (outputs, targets); without it a smaller model learns from this one."
        ),
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            "--accuracy-loss",
            metavar="LOSS",
            help="What of the metric may be lost: '1%' of it, or '0.01' in its own unit.",
        ),
    ] = "1%",
    objective: Annotated[
        str, typer.Option(metavar="latency|memory|train-cost", help="What is to become less.")
    ] = "latency",
    less_is_better: Annotated[bool, typer.Option("--less-is-better", help="The metric is a loss or an error.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="A folder for the chosen model, the report and a picture."),
    ] = None,
    time: Annotated[
        str, typer.Option("--time-budget", metavar="TIME", help="How long to search: 300, 300s, 5m, 1h.")
    ] = "10m",
    recovery: Annotated[str, typer.Option(metavar="TIME", help="Time to train a smaller model in.")] = "60s",
    trial: Annotated[str, typer.Option(metavar="TIME", help="Time limit of one composition.")] = "5m",
    steps: Annotated[int, typer.Option(help="Of training, for --objective train-cost; 0: one pass over the data.")] = 0,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, for --objective train-cost.")] = 1e-3,
    threads: Annotated[int, typer.Option(help="Of torch; 0 leaves them.")] = 0,
    seed: Annotated[int, typer.Option(help="Of all training.")] = 0,
    allow_pickle: Annotated[
        bool,
        typer.Option(
            "--allow-pickle",
            help="Write a pickle where the model cannot be described otherwise; who loads that runs the code in it.",
        ),
    ] = False,
) -> None:
    """Make a model smaller and faster at a measured accuracy cost: prune, distil, quantise, compile, native code."""
    from flatout.core.records.shrink import OBJECTIVES, Order

    aim = one_of(OBJECTIVES, objective, name="--objective")
    if objective == "train-cost" and not (data and loss):
        raise UsageError("--objective train-cost trains: give --data and --loss")
    if out is not None and (out.is_file() or (out.is_dir() and any(out.iterdir()) and not (out / "how.json").exists())):
        raise UsageError(f"--out {out} holds something else; give an empty folder, or one that flatout shrink wrote")
    if out is not None:
        require_folder_to_write("--out", out)
    from flatout.app.session import shrink_named
    from flatout.report.parts.shrink import shrunk_blocks
    from flatout.shrink.compose.saved_model import loading_call

    with (
        tempfile.TemporaryDirectory(prefix="flatout-") as keep,
        open_console(stderr=True).status("measuring") as status,
    ):
        order = Order(
            model=model,
            metric=metric,
            data=data,
            loss=loss,
            root=str(Path.cwd()),
            objective=aim,
            is_cost=less_is_better,
            recovery_s=parsed_seconds(recovery, name="--recovery"),
            num_steps=steps,
            learning_rate=learning_rate,
            seed=seed,
            num_threads=threads,
            keep=keep,
            allow_pickle=allow_pickle,
        )
        found, unwritten = shrink_named(
            order,
            [sys.executable, "-m", "flatout.app.cli.children.shrink_trial"],
            budget=budget,
            budget_s=parsed_seconds(time, name="--time-budget"),
            limit_s=parsed_seconds(trial, name="--trial"),
            out=out,
            on_progress=lambda name: status.update(f"measuring: {name}"),
        )
    print_unwrapped(shrunk_blocks(found))
    if out is not None:
        _write(found, out)
        if unwritten:
            raise PlanError(f"'{out}' has the report; {found.selected} could not be written: {unwritten}")
        print_lines(f"written to {out}: {loading_call(out)} is called like the model")
    if found.selected == found.original.name:
        raise typer.Exit(1)


def _write(found: Shrunk, out: Path) -> None:
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import to_json
    from flatout.report.html.shrink import shrunk_page

    out.mkdir(parents=True, exist_ok=True)
    write_whole_file(out / "report.json", to_json(found))
    write_whole_file(out / "report.html", shrunk_page(found))


COMMAND = Command(
    shrink,
    order=90,
    group="blocks",
    examples=(
        "flatout shrink task:make --metric task:score --data task:batches -o out",
        "flatout shrink task:make --metric task:score --data task:batches --accuracy-loss 1% --time-budget 10m",
    ),
)
