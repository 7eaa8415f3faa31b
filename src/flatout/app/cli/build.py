"""`flatout build`: a trained model as native code in a folder, measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.factories import named_model
from flatout.app.cli.options import require_folder_to_write
from flatout.app.cli.terminal import open_console, print_lines, print_unwrapped
from flatout.app.option_values import one_of
from flatout.core.errors import UsageError

_PRECISIONS: Final = ("float32", "int8")
_BACKENDS: Final = ("native", "aoti")


def build(
    factory: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="Returns the module, example inputs, names of carried state."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder to write.")],
    precision: Annotated[
        str,
        typer.Option(metavar="float32|int8", help="int8: layers whose error stays small take a quarter of the bytes."),
    ] = "float32",
    max_error: Annotated[
        float, typer.Option(help="Of int8: the largest error of an output, relative to its largest number.")
    ] = 0.01,
    backend: Annotated[
        str, typer.Option(metavar="native|aoti", help="native: one C file. aoti: a package of torch's AOTInductor.")
    ] = "native",
    name: Annotated[str, typer.Option(help="Of the C functions: NAME_step, ...")] = "model",
    events: Annotated[int, typer.Option(help="Events that latencies are taken from.")] = 20_000,
) -> None:
    """Build an engine from the model that MODULE:FUNCTION returns, measure it, and write its folder."""
    _check(out, precision=precision, backend=backend, events=events)
    if not max_error > 0:
        raise UsageError(f"--max-error {max_error} is no number above 0")
    model = named_model(factory)

    from flatout.blocks.inference.native import build as build_engine
    from flatout.report.parts.native import native_blocks

    with open_console(stderr=True).status("building"):
        engine = build_engine(
            model.module,
            model.example_inputs,
            state=model.state,
            name=name,
            precision=precision,
            max_error=max_error,
            backend=backend,
            events=events,
        )
        engine.save(out)
    if engine.report is not None:
        print_unwrapped(native_blocks(engine.report))
    print_lines(f"written to {out}")


def _check(out: Path, *, precision: str, backend: str, events: int) -> None:
    """Check the options before anything is imported or built in vain."""
    one_of(_PRECISIONS, precision, name="--precision")
    one_of(_BACKENDS, backend, name="--backend")
    if precision != "float32" and backend == "aoti":
        raise UsageError(f"--precision {precision} is of the native back end; leave out --backend aoti")
    if events < 1:
        raise UsageError(f"--events {events} is no number above 0")
    require_folder_to_write("--out", out)


COMMAND = Command(
    build,
    order=80,
    group="blocks",
    examples=(
        "flatout build package.model:make -o engine",
        "flatout build package.model:make -o engine --precision int8",
    ),
)
