"""`flatout fit`: what a layout of a model takes of each stage's device, and whether that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def fit(
    model: Annotated[
        Path, typer.Option(help="Sizes of the model, a TOML file: hidden, layers, heads, vocab, seq, ...")
    ],
    layout: Annotated[
        Path | None, typer.Option(help="A layout, a TOML file as `flatout scale --out` writes it.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="How many of which device, as 8xh100-sxm.")] = "",
    optimizer_bytes: Annotated[
        int, typer.Option(help="State of the optimizer for each parameter; Adam and a copy: 12.")
    ] = 12,
) -> None:
    """Count the memory of each stage, without a device; exits with 1 when one stage does not fit."""
    from flatout.cost.roofline import memory_bytes
    from flatout.hardware.catalog import load
    from flatout.records.scale import Layout, Software
    from flatout.reporting.scale import accounting_lines, layout_text, memory_lines
    from flatout.simulate.memory import memory_of
    from flatout.simulate.reading import cluster_of, read_layout, read_model

    shape, given = read_model(model), read_layout(layout) if layout is not None else Layout()
    room = memory_bytes(load(cluster_of(gpus).device)) if gpus else None
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{model.stem}, {layout_text(given)}", markup=False)
    stages = memory_of(shape, given, Software(state_bytes=optimizer_bytes))
    fits = True
    for stage, memory in enumerate(stages):
        verdict = "" if room is None else " fits" if memory.total_bytes <= room else " DOES NOT FIT"
        of = "" if room is None else f" of {room / 2**30:.1f} GiB"
        console.print(f"stage {stage}: {memory.total_bytes / 2**30:.1f} GiB{of}{verdict}", markup=False)
        for line in memory_lines(memory):
            console.print(line, markup=False)
        fits = fits and (room is None or memory.total_bytes <= room)
    for line in accounting_lines(shape):
        console.print(line, markup=False)
    if not fits:
        raise typer.Exit(1)
