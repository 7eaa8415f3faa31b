"""`flatout scale`: which layout of a model is fastest on so many devices, and why; no device is needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flatout.app.cli.command import Command, help_epilog
from flatout.app.cli.options import require_writable
from flatout.app.cli.terminal import print_lines, print_unwrapped, print_written
from flatout.core.files import STANDARD_OUTPUT

if TYPE_CHECKING:
    from flatout.core.records.failure import Goodput
    from flatout.core.records.scale import Cluster, Compression, Constants, ModelShape, Ranked, Software
    from flatout.scale.search import Ranking

_TRILLION = 1e12
"""Tokens of a run, where nobody said."""


scale = typer.Typer(
    invoke_without_command=True,
    help="Rank the layouts that fit by the predicted seconds of a step; `flatout scale price` prices one.",
)

ModelFile = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="FILE", help="Sizes of the model, a TOML file: hidden, layers, heads, vocab, seq, ..."
    ),
]
Devices = Annotated[str | None, typer.Option("--gpus", help="How many of which device, as 1024xh100-sxm.")]
SheetFile = Annotated[
    Path | None,
    typer.Option(
        "--device", metavar="FILE", help="A data sheet of your own, a TOML file; then --gpus is the number alone."
    ),
]
NodeSize = Annotated[
    int | None,
    typer.Option(
        "--gpus-per-node", metavar="N", help="Devices that are joined by their own links; 8, or 72 of an NVL72."
    ),
]
Fabric = Annotated[float, typer.Option("--fabric", help="Gbit/s of the network between nodes, for each device.")]
SoftwareName = Annotated[
    str,
    typer.Option(
        "--software",
        metavar="NAME|FILE",
        help="What trains: megatron-core, megatron-2021, deepspeed, fsdp1, fsdp2, fsdp2-compiled, flatout, or a TOML file.",
    ),
]


@scale.callback()
def _ranked(
    context: typer.Context,
    model: ModelFile = None,
    gpus: Devices = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Samples of a step over all devices, as 1024, or tokens, as 4M-tokens."),
    ] = None,
    device: SheetFile = None,
    node: NodeSize = None,
    fabric: Fabric = 400.0,
    software_name: SoftwareName = "",
    dtype: Annotated[str, typer.Option(help="Of products: bfloat16, float16, float8.")] = "bfloat16",
    top: Annotated[int, typer.Option(help="Layouts to print.")] = 10,
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured steps to fit constants on, a JSON file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the first layout to this file, as TOML.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the ranking as one HTML page to this file.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Length of the run, as 300G or 15T; 1T unless given.")] = None,
    failures: Annotated[
        float | None, typer.Option(help="Interruptions that 1000 nodes cause in a day: say what they leave of the run.")
    ] = None,
    stall: Annotated[float, typer.Option(help="Seconds that a checkpoint stops the steps.")] = 60.0,
    restart: Annotated[float, typer.Option(help="Seconds from a failure until steps go on.")] = 600.0,
    price: Annotated[float | None, typer.Option(help="Of a GPU-hour, in whatever money.")] = None,
    compression: Annotated[
        str,
        typer.Option(
            help="Look at compressed gradients too, which change results: bfloat16, powersgd, sign, or some, as a,b."
        ),
    ] = "",
    straggler: Annotated[
        float, typer.Option(help="Deviation of a rank's own seconds, over their mean: 0.02 for two percent.")
    ] = 0.0,
    host_memory: Annotated[
        float | None, typer.Option(help="GiB of a node's memory, for what is offloaded; unknown unless given.")
    ] = None,
    disk: Annotated[float, typer.Option(help="GB/s of the disk that each device has, reading or writing.")] = 4.0,
) -> None:
    """Rank the layouts that fit by the predicted seconds of a step, and say where they go."""
    if context.invoked_subcommand is not None:
        return
    from msgspec import structs

    from flatout.core.errors import UsageError
    from flatout.core.records.scale import Constants, Software
    from flatout.report.parts.scale import memory_lines, ranking_blocks
    from flatout.scale.calibration import Calibrated
    from flatout.scale.executor import EXECUTOR
    from flatout.scale.inputs import cluster_of, node_size, read_model, read_runs, samples_of, tokens_of
    from flatout.scale.presets import named_software
    from flatout.scale.search import ranked_layouts
    from flatout.scale.usual import usual_constants

    require_writable(out=out, html=html)
    takes_stdout = STANDARD_OUTPUT in (out, html)
    show = partial(print_lines, stderr=takes_stdout)
    if model is None or gpus is None or batch is None:
        raise UsageError(
            "give --model, --gpus and --batch; or `flatout scale price` for one layout, see `flatout scale -h`"
        )
    if (
        straggler < 0
        or (node is not None and node < 1)
        or fabric <= 0
        or disk <= 0
        or (price is not None and price < 0)
    ):
        raise UsageError("--straggler and --price are 0 or more, --gpus-per-node, --fabric and --disk are positive")
    shape, kinds = read_model(model), _compressions(compression)
    cluster = cluster_of(
        gpus, node=node, fabric_bytes_per_s=fabric * 1e9 / 8, disk_bytes_per_s=disk * 1e9, device=device
    )
    node = node or node_size(cluster)
    host_bytes = None if host_memory is None else host_memory * 2**30 / node
    if cluster.host is not None:
        cluster = structs.replace(cluster, host=structs.replace(cluster.host, memory_bytes=host_bytes))
    samples = samples_of(batch, shape)
    run_tokens = None if tokens is None else tokens_of(tokens)
    run = _RunLength(run_tokens, failures, stall, restart, price, -(-cluster.num_devices // node))
    runs = read_runs(measured) if measured is not None else []
    # what was measured here are steps of our executor
    named = named_software(software_name)[0] if software_name else EXECUTOR if measured is not None else Software()
    software = structs.replace(named, dtype=dtype)
    constants = usual_constants(shape, cluster, software, Constants(straggler_share=straggler)).constants
    calibrated = Calibrated(runs, cluster, software, constants) if measured is not None else None
    found = ranked_layouts(
        shape,
        cluster,
        samples,
        software,
        constants,
        most=top,
        calibrated=calibrated,
        compressions=kinds,
        preset=software_name,
    )
    show(
        f"{model.stem} on {cluster.num_devices} x {cluster.device}, {samples} samples of {shape.seq} tokens a step: "
        f"{found.num_layouts} layouts, {found.num_too_large} of them too large"
    )
    if not found.best:
        assert found.smallest is not None
        show("none fits; the smallest takes of its fullest device:", *memory_lines(found.smallest))
        raise typer.Exit(1)
    best = found.best[0]
    print_unwrapped(
        ranking_blocks(found.best, tokens=samples * shape.seq, num_devices=cluster.num_devices), stderr=takes_stdout
    )
    if found.widened:
        show(f"nothing fits without it: {found.widened}")
    if best.memory.host_bytes and host_bytes is None and best.layout.offload_to == "host":
        of_node = best.memory.host_bytes * node / 2**30
        show(f"it takes {of_node:.0f} GiB of each node's memory; give --host-memory to check that")
    show("memory of the first's fullest device:", *memory_lines(best.memory))
    show(*run.lines(best.step.total_s, samples * shape.seq, cluster.num_devices))
    how = (
        "predicted from data sheets; nothing was measured here, and intervals are as wide as such predictions were off"
    )
    if calibrated is not None:
        constants = calibrated.constants
        how = f"predicted with constants of {len(runs)} measured steps: {', '.join(calibrated.fitted) or 'the usual ones'}"
    if out is not None:
        _write_layout(out, best, f"{model.stem} on {gpus}")
        print_written(out, stderr=takes_stdout)
    if html is not None:
        _write_page(html, found, model.stem, _Prediction(shape, cluster, samples, software, constants), run, how)
        print_written(html, stderr=takes_stdout)
    show(how)


@scale.command(
    epilog=help_epilog(
        "flatout scale price --model sizes.toml --layout layout.toml --gpus 64xh100-sxm",
        "flatout scale price --model sizes.toml --layout layout.toml --gpus 64xh100-sxm --software fsdp2 --json price.json",
    )
)
def price(
    layout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The layout, a TOML file, as `flatout scale --out` writes it.")
    ] = None,
    model: ModelFile = None,
    gpus: Devices = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            "--cluster", metavar="FILE", help="Or the cluster with its links, a TOML file: device, num_devices, tiers."
        ),
    ] = None,
    device: SheetFile = None,
    node: NodeSize = None,
    fabric: Fabric = 400.0,
    software_name: SoftwareName = "",
    dtype: Annotated[str, typer.Option(help="Of products: bfloat16, float16, float8, mxfp8, nvfp4.")] = "",
    measured: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measured steps to fit constants on, a JSON file.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the price to this file.")] = None,
) -> None:
    """Price one layout: seconds of a step and where they go, memory of each stage by kind, MFU, and what that follows from."""
    from msgspec import structs

    from flatout.core.errors import UsageError
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import to_json
    from flatout.core.records.scale import Software
    from flatout.report.parts.price import price_blocks
    from flatout.scale.calibration import Calibrated
    from flatout.scale.inputs import cluster_of, read_cluster, read_layout, read_model, read_runs
    from flatout.scale.presets import named_software
    from flatout.scale.pricing import price as priced
    from flatout.scale.usual import usual_constants

    if model is None or layout is None or (gpus is None) == (cluster_file is None):
        raise UsageError("give --model, --layout, and --gpus or --cluster; see `flatout scale price -h`")
    if fabric <= 0 or (node is not None and node < 1):
        raise UsageError("--gpus-per-node and --fabric are positive")
    require_writable(json=json)
    shape, placed = read_model(model), read_layout(layout)
    cluster = (
        read_cluster(cluster_file)
        if cluster_file is not None
        else cluster_of(gpus or "", node=node, fabric_bytes_per_s=fabric * 1e9 / 8, device=device)
    )
    software, words = (
        named_software(software_name) if software_name else (Software(), "Megatron's kind, with fused attention")
    )
    software = structs.replace(software, dtype=dtype) if dtype else software
    constants = None
    if measured is not None:
        usual = usual_constants(shape, cluster, software).constants
        constants = Calibrated(read_runs(measured), cluster, software, usual).constants
    found = priced(shape, placed, cluster, software, constants, preset=software_name)
    print_unwrapped(price_blocks(found, name=model.stem, software=words), stderr=json == STANDARD_OUTPUT)
    if json is not None:
        write_whole_file(json, to_json(found))
        print_written(json, stderr=json == STANDARD_OUTPUT)


@scale.command(
    epilog=help_epilog(
        "flatout scale pareto --model sizes.toml --gpus 512xh100-sxm --batch 2M-tokens",
        "flatout scale pareto --model sizes.toml --gpus 512xh100-sxm --batch 1024 --software megatron-core --price 2.5",
    )
)
def pareto(
    model: ModelFile = None,
    gpus: Devices = None,
    batch: Annotated[str | None, typer.Option(help="Samples of a step, as 1024, or tokens, as 4M-tokens.")] = None,
    device: SheetFile = None,
    node: NodeSize = None,
    fabric: Fabric = 400.0,
    software_name: SoftwareName = "",
    dtype: Annotated[str, typer.Option(help="Of products: bfloat16, float16, float8, mxfp8, nvfp4.")] = "",
    tokens: Annotated[str, typer.Option(help="Length of the run, as 300G or 15T.")] = "1T",
    price: Annotated[float | None, typer.Option(help="Of a GPU-hour, in whatever money.")] = None,
    top: Annotated[int, typer.Option(help="Layouts to print for each number of devices.")] = 3,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write all of them to this file.")] = None,
) -> None:
    """Compare numbers of devices: layouts that no other beats in seconds, memory and devices, with GPU-hours and energy."""
    from msgspec import structs

    from flatout.core.errors import UsageError
    from flatout.core.files import write_whole_file
    from flatout.core.records.record import to_json
    from flatout.core.records.scale import ParetoLayouts, Software
    from flatout.report.parts.scale import pareto_blocks
    from flatout.scale.inputs import cluster_of, read_model, samples_of, tokens_of
    from flatout.scale.pareto_layouts import pareto as layouts_of
    from flatout.scale.pareto_layouts import usual_numbers
    from flatout.scale.presets import named_software

    if model is None or gpus is None or batch is None:
        raise UsageError("give --model, --gpus (the most there are) and --batch; see `flatout scale pareto -h`")
    if fabric <= 0 or (node is not None and node < 1) or top < 1 or (price is not None and price < 0):
        raise UsageError("--gpus-per-node, --fabric and --top are positive, --price is 0 or more")
    require_writable(json=json)
    shape = read_model(model)
    build = partial(cluster_of, node=node, fabric_bytes_per_s=fabric * 1e9 / 8, device=device)
    whole = build(gpus)
    kind = gpus.partition("x")[2]
    software = named_software(software_name)[0] if software_name else Software()
    software = structs.replace(software, dtype=dtype) if dtype else software
    samples = samples_of(batch, shape)
    rows = layouts_of(
        shape,
        lambda number: build(f"{number}x{kind}" if kind else f"{number}"),
        samples,
        software,
        num_devices=usual_numbers(whole.num_devices),
        preset=software_name,
    )
    blocks = pareto_blocks(
        rows, tokens=samples * shape.seq, run_tokens=tokens_of(tokens), price=price, most=top, name=model.stem
    )
    print_unwrapped(blocks, stderr=json == STANDARD_OUTPUT)
    if json is not None:
        write_whole_file(json, to_json(ParetoLayouts(model=shape, global_batch=samples, rows=rows)))
        print_written(json, stderr=json == STANDARD_OUTPUT)


class _Prediction(NamedTuple):
    """The model, cluster and constants that a prediction used."""

    model: ModelShape
    cluster: Cluster
    samples: int
    software: Software
    constants: Constants


class _RunLength(NamedTuple):
    """What the user says of the whole run."""

    tokens: float | None
    failures: float | None
    stall_s: float
    restart_s: float
    price: float | None
    num_nodes: int

    def goodput(self, num_nodes: int | None = None) -> Goodput | None:
        """What failures leave of its time; None where nobody said how often they come."""
        from flatout.core.records.failure import Failures, Recovery
        from flatout.scale.failures import expected_goodput

        if self.failures is None:
            return None
        many = Failures(num_nodes=num_nodes or self.num_nodes, per_thousand_node_days=self.failures)
        return expected_goodput(many, Recovery(stall_s=self.stall_s, restart_s=self.restart_s))

    def lines(self, step_s: float, tokens: int, num_devices: int) -> Iterator[str]:
        """Nothing where nothing was asked."""
        from flatout.report.parts.scale import run_lines

        if self.tokens is None and self.failures is None and self.price is None:
            return iter(())
        return run_lines(
            step_s,
            tokens=tokens,
            num_devices=num_devices,
            run_tokens=self.tokens or _TRILLION,
            expected=self.goodput(),
            price=self.price,
        )


def _write_layout(path: Path, best: Ranked, what: str) -> None:
    from flatout.core.files import write_whole_file
    from flatout.scale.inputs import layout_toml

    text = f"{what}, predicted {best.step.total_s:.3f} s a step, {best.memory.total_bytes / 2**30:.1f} GiB"
    write_whole_file(path, layout_toml(best.layout, comment=text))


def _write_page(path: Path, found: Ranking, name: str, prediction: _Prediction, run: _RunLength, how: str) -> None:
    from flatout.core.files import write_whole_file
    from flatout.machine.cost.roofline import memory_bytes
    from flatout.machine.specs.catalog import load_spec
    from flatout.report.html.scale import Failing, First, Question, scale_page
    from flatout.scale.memory import memory_of
    from flatout.scale.step import timeline

    model, cluster, samples, software, constants = prediction
    layout, goodput = found.best[0].layout, run.goodput()
    first = First(memory_of(model, layout, software), timeline(model, layout, cluster, software, constants))
    failing = None
    if goodput is not None:
        each = cluster.num_devices / run.num_nodes
        sizes = [1 << power for power in range(8, 18)]
        curve = [(size, g.goodput) for size in sizes if (g := run.goodput(max(1, round(size / each)))) is not None]
        failing = Failing(
            f"{run.failures:g} interruptions per 1000 node-days", {"as it is": goodput}, {"as it is": curve}
        )
    question = Question(name, model, cluster, samples, memory_bytes(load_spec(cluster.device)))
    write_whole_file(path, scale_page(found, question, how=how, first=first, failing=failing))


def _compressions(text: str) -> tuple[Compression, ...]:
    from typing import get_args

    from flatout.core.errors import UsageError
    from flatout.core.records.scale import Compression

    known = {name: name for name in get_args(Compression) if name != "none"}
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--compression has '{unknown[0]}'; give some of {', '.join(known)}")
    return tuple(known[name] for name in names)


COMMAND = Command(
    scale,
    order=40,
    group="devices",
    examples=(
        "flatout scale --model sizes.toml --gpus 64xh100-sxm --batch 1M-tokens",
        "flatout scale --model sizes.toml --gpus 64xh100-sxm --batch 1M-tokens --out layout.toml --html plan.html",
    ),
)
