"""The commands, gathered; errors of ours end here, as one line."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from flatout.cli.build import build
from flatout.cli.calibrate import calibrate
from flatout.cli.check import check
from flatout.cli.compare import compare
from flatout.cli.edit import edit
from flatout.cli.fit import fit
from flatout.cli.levers import levers
from flatout.cli.machine import machine
from flatout.cli.matmul import matmul
from flatout.cli.replay import replay
from flatout.cli.report import report
from flatout.cli.rules import rules
from flatout.cli.run import run as run_with_plan
from flatout.cli.runs import runs
from flatout.cli.scale import scale
from flatout.cli.schema import schema
from flatout.cli.shrink import shrink
from flatout.cli.simulate import simulate
from flatout.cli.survive import survive
from flatout.cli.tune import tune
from flatout.cli.verify import verify
from flatout.cli.watch import watch
from flatout.errors import FlatoutError

app = typer.Typer(
    name="flatout",
    help="Makes PyTorch models run flat out, and proves it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# What flatout does not know is the script's own; after `--` everything is.
app.command(context_settings={"ignore_unknown_options": True})(check)
app.command()(machine)
app.command()(matmul)
app.command()(scale)
app.command()(calibrate)
app.command()(fit)
app.command()(simulate)
app.command()(build)
app.command()(shrink)
app.command()(report)
app.command()(compare)
app.command()(rules)
app.command()(schema)
app.command(context_settings={"ignore_unknown_options": True})(verify)
app.command(name="run", context_settings={"ignore_unknown_options": True})(run_with_plan)
app.command(context_settings={"ignore_unknown_options": True})(tune)
app.command(context_settings={"ignore_unknown_options": True})(edit)
app.command()(levers)
app.command(context_settings={"ignore_unknown_options": True})(watch)
app.command()(replay)
app.command(context_settings={"ignore_unknown_options": True})(survive)
app.add_typer(runs, name="runs")


def run() -> None:
    """Parse and run; an error of ours is printed without a traceback and exits with 2."""
    try:
        app()
    except FlatoutError as e:
        Console(stderr=True).print(f"flatout: {e}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(show_version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False) -> None:
    if show_version:
        print(version("flatout"))
        raise typer.Exit
