"""`flatout fit`: what a step of a model, or a layout of a large one, takes of a device, and whether that is there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.factories import named_function
from flatout.app.cli.options import require_writable
from flatout.app.cli.terminal import print_lines, print_written

if TYPE_CHECKING:
    from flatout.core.records.scale import Software


def fit(
    step: Annotated[
        str, typer.Argument(help="module:function that makes a model and returns its step, which is run without data.")
    ] = "",
    model: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Or the sizes of a transformer: a TOML file with hidden, layers, ..."),
    ] = None,
    layout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A layout of it, as `flatout scale --out` writes it.")
    ] = None,
    gpus: Annotated[str, typer.Option(help="How many of which device, as 8xh100-sxm.")] = "",
    device: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A data sheet of your own, a TOML file; then --gpus is the number alone."),
    ] = None,
    software_name: Annotated[
        str,
        typer.Option(
            "--software",
            metavar="NAME|FILE",
            help="What trains: megatron-core, fsdp1, fsdp2, fsdp2-compiled, flatout, ..., or a TOML file.",
        ),
    ] = "",
    optimizer_bytes: Annotated[
        int | None, typer.Option(help="State of the optimizer for each parameter; Adam and a copy: 12.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what each stage of the layout holds as one HTML page to this file."),
    ] = None,
) -> None:
    """Count the memory of a step or a layout without a device, without allocating it; exits with 1 when it does not fit."""
    from flatout.core.errors import UsageError
    from flatout.machine.cost.roofline import memory_bytes
    from flatout.machine.specs.catalog import load_spec
    from flatout.scale.inputs import cluster_of

    cluster = cluster_of(gpus, device=device) if gpus else None
    room = memory_bytes(load_spec(cluster.device)) if cluster is not None else None
    if bool(step) == (model is not None):
        raise UsageError("give either module:function or --model FILE")
    if html is not None and model is None:
        raise UsageError("--html is of a layout's stages; give --model and --layout with it")
    require_writable(html=html)
    if model is None:
        does_fit = _step(step, room)
    else:
        software = _software(software_name, optimizer_bytes)
        does_fit = _layout(model, layout, room, cluster.num_devices if cluster is not None else None, software, html)
    if not does_fit:
        raise typer.Exit(1)


def _software(name: str, optimizer_bytes: int | None) -> Software:
    from msgspec import structs

    from flatout.core.records.scale import Software
    from flatout.scale.presets import named_software

    software = named_software(name)[0] if name else Software()
    return software if optimizer_bytes is None else structs.replace(software, state_bytes=optimizer_bytes)


def _step(name: str, room: float | None) -> bool:
    """A step of the user's own, run on tensors without data."""
    from flatout.machine.measure.weightless import weigh
    from flatout.report.parts.scale import footprint_lines
    from flatout.scale.memory import with_slack

    make = named_function(name, gives="a step; it makes the model, too")
    found = weigh(make)
    total = with_slack(found.peak_bytes)
    print_lines(*footprint_lines(found, total))
    if room is None:
        return True
    print_lines(f"of {room / 2**30:.1f} GiB: {'fits' if total <= room else 'DOES NOT FIT'}")
    return total <= room


def _layout(
    model: Path,
    layout: Path | None,
    room: float | None,
    num_devices: int | None,
    software: Software,
    html: Path | None,
) -> bool:
    """Each stage of a layout."""
    from flatout.core.files import STANDARD_OUTPUT, write_whole_file
    from flatout.core.records.scale import Layout
    from flatout.report.html.scale import fit_page
    from flatout.report.parts.scale import BOUND, accounting_lines, layout_text, memory_lines
    from flatout.scale.inputs import read_layout, read_model
    from flatout.scale.memory import memory_of
    from flatout.scale.rules import require_possible

    takes_stdout = html == STANDARD_OUTPUT
    show = partial(print_lines, stderr=takes_stdout)
    shape, parsed_layout = read_model(model), read_layout(layout) if layout is not None else Layout()
    require_possible(shape, parsed_layout, num_devices)
    show(f"{model.stem}, {layout_text(parsed_layout)}")
    stages = memory_of(shape, parsed_layout, software)
    fits = True
    for stage, memory in enumerate(stages):
        verdict = "" if room is None else " fits" if memory.total_bytes <= room else " DOES NOT FIT"
        of = "" if room is None else f" of {room / 2**30:.1f} GiB"
        show(f"stage {stage}: {memory.total_bytes / 2**30:.1f} GiB{of}{verdict}")
        fits = fits and (room is None or memory.total_bytes <= room)
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].total_bytes)
    show(f"fullest: stage {fullest}" if len(stages) > 1 else "it holds:")
    show(*memory_lines(stages[fullest]), BOUND, *accounting_lines(shape))
    if html is not None:
        write_whole_file(html, fit_page(stages, parsed_layout, name=model.stem, model=shape, room_bytes=room))
        print_written(html, stderr=takes_stdout)
    return fits


COMMAND = Command(
    fit,
    order=60,
    group="devices",
    examples=(
        "flatout fit --model sizes.toml --layout layout.toml --gpus 8xh100-sxm",
        "flatout fit package.train:step --gpus 1xh200",
    ),
)
