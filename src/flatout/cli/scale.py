"""`flatout scale`: which layout of a model is fastest on so many devices, and why; no device is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def scale(
    model: Annotated[
        Path, typer.Option(help="Sizes of the model, a TOML file: hidden, layers, heads, vocab, seq, ...")
    ],
    gpus: Annotated[str, typer.Option(help="How many of which device, as 1024xh100-sxm.")],
    batch: Annotated[str, typer.Option(help="Samples of a step over all devices, as 1024, or tokens, as 4M-tokens.")],
    node: Annotated[int, typer.Option(help="Devices that are joined by their own links.")] = 8,
    fabric: Annotated[float, typer.Option(help="Gbit/s of the network between nodes, for each device.")] = 400.0,
    dtype: Annotated[str, typer.Option(help="Of products: bfloat16, float16, float8.")] = "bfloat16",
    top: Annotated[int, typer.Option(help="Layouts to print.")] = 10,
    measured: Annotated[Path | None, typer.Option(help="Measured steps to fit constants on, a JSON file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the first layout there, as TOML.")] = None,
) -> None:
    """Rank the layouts that fit by the predicted seconds of a step, and say where they go."""
    from flatout.records.record import write_file
    from flatout.records.scale import Constants, Software
    from flatout.reporting.scale import memory_lines, ranking_lines
    from flatout.simulate.calibration import Calibrated
    from flatout.simulate.reading import cluster_of, layout_toml, read_model, read_runs, samples_of
    from flatout.simulate.search import ranked

    shape = read_model(model)
    cluster = cluster_of(gpus, node=node, fabric_bytes_per_s=fabric * 1e9 / 8)
    samples = samples_of(batch, shape)
    console = Console(soft_wrap=True, highlight=False)
    software = Software(dtype=dtype)
    runs = read_runs(measured) if measured is not None else []
    calibrated = Calibrated(runs, cluster, software) if measured is not None else None
    found = ranked(shape, cluster, samples, software, Constants(), most=top, calibrated=calibrated)
    console.print(
        f"{model.stem} on {cluster.num_devices} x {cluster.device}, {samples} samples of {shape.seq} tokens a step: "
        f"{found.num_layouts} layouts, {found.num_too_large} of them too large",
        markup=False,
    )
    if not found.best:
        assert found.smallest is not None
        console.print("none fits; the smallest takes of its fullest device:", markup=False)
        for line in memory_lines(found.smallest):
            console.print(line, markup=False)
        raise typer.Exit(1)
    for line in ranking_lines(found.best, tokens=samples * shape.seq, num_devices=cluster.num_devices):
        console.print(line, markup=False)
    console.print("memory of the first's fullest device:", markup=False)
    for line in memory_lines(found.best[0].memory):
        console.print(line, markup=False)
    if out is not None:
        best = found.best[0]
        said = f"{model.stem} on {gpus}, predicted {best.step.total_s:.3f} s a step, {best.memory.total_bytes / 2**30:.1f} GiB"
        write_file(out, layout_toml(best.layout, said=said))
        console.print(f"written to {out}", markup=False)
    how = "predicted from data sheets; nothing was measured here, and intervals are as wide as published planners err"
    console.print(
        how if calibrated is None else f"predicted with constants of {len(runs)} measured steps: {calibrated.constants}"
    )
