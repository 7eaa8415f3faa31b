"""`flatout fit`: what a step of a model, or a layout of a large one, takes of a device, and whether that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from flatout.cli.factories import named_function


def fit(
    step: Annotated[
        str, typer.Argument(help="module:function that makes a model and returns its step, which is run without data.")
    ] = "",
    model: Annotated[
        Path | None, typer.Option(help="Or the sizes of a transformer: a TOML file with hidden, layers, ...")
    ] = None,
    layout: Annotated[Path | None, typer.Option(help="A layout of it, as `flatout scale --out` writes it.")] = None,
    gpus: Annotated[str, typer.Option(help="How many of which device, as 8xh100-sxm.")] = "",
    optimizer_bytes: Annotated[
        int, typer.Option(help="State of the optimizer for each parameter; Adam and a copy: 12.")
    ] = 12,
    html: Annotated[
        Path | None, typer.Option(help="Write what each stage of the layout holds as a page there.")
    ] = None,
) -> None:
    """Count the memory without a device and without allocating it; exits with 1 when it does not fit."""
    from flatout.cost.roofline import memory_bytes
    from flatout.errors import UsageError
    from flatout.hardware.catalog import load
    from flatout.simulate.reading import cluster_of

    room = memory_bytes(load(cluster_of(gpus).device)) if gpus else None
    if bool(step) == (model is not None):
        raise UsageError("give either module:function or --model FILE")
    if html is not None and model is None:
        raise UsageError("--html is of a layout's stages; give --model and --layout with it")
    console = Console(soft_wrap=True, highlight=False)
    fits = _step(step, room, console) if model is None else _layout(model, layout, room, optimizer_bytes, console, html)
    if not fits:
        raise typer.Exit(1)


def _step(name: str, room: float | None, console: Console) -> bool:
    """A step of the user's own, run on tensors without data."""
    from flatout.measure.weightless import weigh
    from flatout.reporting.scale import footprint_lines
    from flatout.simulate.memory import with_slack

    make = named_function(name, gives="a step; it makes the model, too")
    found = weigh(make)
    total = with_slack(found.peak_bytes)
    for line in footprint_lines(found, total):
        console.print(line, markup=False)
    if room is None:
        return True
    console.print(f"of {room / 2**30:.1f} GiB: {'fits' if total <= room else 'DOES NOT FIT'}", markup=False)
    return total <= room


def _layout(
    model: Path, layout: Path | None, room: float | None, optimizer_bytes: int, console: Console, html: Path | None
) -> bool:
    """Each stage of a layout."""
    from flatout.records.record import write_file
    from flatout.records.scale import Layout, Software
    from flatout.reporting.html.scale import fit_page
    from flatout.reporting.scale import accounting_lines, bound_lines, layout_text, memory_lines
    from flatout.simulate.memory import memory_of
    from flatout.simulate.reading import read_layout, read_model

    shape, given = read_model(model), read_layout(layout) if layout is not None else Layout()
    console.print(f"{model.stem}, {layout_text(given)}", markup=False)
    stages = memory_of(shape, given, Software(state_bytes=optimizer_bytes))
    fits = True
    for stage, memory in enumerate(stages):
        verdict = "" if room is None else " fits" if memory.total_bytes <= room else " DOES NOT FIT"
        of = "" if room is None else f" of {room / 2**30:.1f} GiB"
        console.print(f"stage {stage}: {memory.total_bytes / 2**30:.1f} GiB{of}{verdict}", markup=False)
        fits = fits and (room is None or memory.total_bytes <= room)
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total_bytes)
    console.print(f"fullest: stage {fullest}" if len(stages) > 1 else "it holds:", markup=False)
    for line in (*memory_lines(stages[fullest]), *bound_lines(), *accounting_lines(shape)):
        console.print(line, markup=False)
    if html is not None:
        write_file(html, fit_page(stages, given, name=model.stem, model=shape, room_bytes=room))
        console.print(f"written to {html}", markup=False)
    return fits
