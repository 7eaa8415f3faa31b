"""`flatout matmul`: what a product of matrices takes on this machine, by which implementation, and how far the floor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.terminal import open_console, print_lines
from flatout.core.errors import FlatoutError, UsageError
from flatout.core.runtime.cache_folder import default_cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from flatout.blocks.kernels.matmul.problem import MatmulProblem
    from flatout.blocks.kernels.matmul.table import MeasuredProblem
    from flatout.report.parts.products import ProductLine


def matmul(
    shapes: Annotated[str, typer.Option(help="Measure these, as 4096x50257x768,1000x1000x1000: M x N x K.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the operands.")] = "bfloat16",
    layout: Annotated[str, typer.Option(help="nn; nt for a linear layer's weight; tn, tt: as in BLAS.")] = "nn",
    constant: Annotated[
        bool, typer.Option("--constant", "--kept", help="The second operand is a weight: copies of it are made once.")
    ] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A bias is added.")] = False,
    activation: Annotated[str, typer.Option(help="relu, silu, gelu or gelu_tanh follows.")] = "",
    residual: Annotated[bool, typer.Option("--residual", help="Another matrix is added.")] = False,
    precision: Annotated[str, typer.Option(help="float32: allow products of coarser types of that accuracy.")] = "",
    compiled: Annotated[bool, typer.Option("--compiled", help="Measure torch.compile's templates, too.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu; the GPU if there is one.")] = "",
) -> None:
    """Measure matrix products and store which implementation is fastest, for programs to use, or show what is stored."""
    import torch

    from flatout.blocks.kernels.matmul import dispatch, table
    from flatout.blocks.kernels.matmul.problem import Epilogue, plain_problem
    from flatout.report.parts.products import product_text

    notes = open_console(stderr=True)
    table.keep_in(default_cache_folder())
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    follows = Epilogue(bias, activation or None, residual)  # type: ignore[arg-type]
    entries: list[MeasuredProblem] = []
    for m, n, k in _sizes(shapes):
        problem: MatmulProblem = plain_problem(
            m,
            n,
            k,
            dtype=_dtype(dtype),
            device=where,
            layout=layout,
            is_constant=constant,
            epilogue=follows,
            precision=precision or None,  # type: ignore[arg-type]
        )
        entries.append(dispatch.measure_matmul(problem, has_compiled=compiled))
    for measured in entries or table.device_table(where).entries.values():
        print_lines(*map(product_text, _lines(measured, where)))
    if not shapes and not table.device_table(where).entries:
        notes.print("nothing is measured yet; measure with --shapes MxNxK", style="dim")
    notes.print(f"stored in {table.table_path(where)}", style="dim")


def _sizes(shapes: str) -> Iterator[tuple[int, int, int]]:
    for text in filter(None, shapes.split(",")):
        sizes = text.split("x")
        if len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise UsageError(f"shape '{text}' is not MxNxK; give three numbers above 0, as 4096x50257x768")
        m, n, k = map(int, sizes)
        yield m, n, k


def _dtype(name: str) -> torch.dtype:
    import torch

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    if name not in dtypes:
        raise UsageError(f"dtype '{name}' is not known; give one of {', '.join(dtypes)}")
    return dtypes[name]


def _lines(measured: MeasuredProblem, where: torch.device) -> Iterator[ProductLine]:
    """One line for calls, one for the device where it has a clock of its own. Of the tiles the best is shown."""
    from flatout.blocks.kernels.matmul.table import fastest
    from flatout.report.parts.products import ProductLine

    floor_s = _floor_s(measured, where)
    for clock in ("device", "call"):
        taken = fastest(measured, is_captured=clock == "device").variant
        times: dict[str, tuple[str, float]] = {}
        for row in measured.rows:
            estimate = row.device if clock == "device" else row.call
            if estimate is None:
                continue
            best = times.get(row.variant.name)
            if best is None or row.variant == taken or (best[0] != str(taken) and estimate.value < best[1]):
                times[row.variant.name] = str(row.variant), estimate.value
        if times:
            yield ProductLine(measured.problem, clock, list(times.values()), str(taken), floor_s)


def _floor_s(measured: MeasuredProblem, where: torch.device) -> float | None:
    """The least seconds by the ceilings measured on this machine, else the data sheet's; None where neither is known."""
    from flatout.machine.cost.roofline import operation_floor
    from flatout.machine.measure import cache, probe
    from flatout.machine.specs import catalog

    identity = probe.identify(where)
    try:
        machine = cache.read_machine(default_cache_folder(), identity)
        floor = operation_floor(machine, flop=measured.flop, traffic_bytes=measured.traffic_bytes, dtype=measured.dtype)
    except FlatoutError:
        spec = catalog.match(identity.device_name)
        if spec is None:
            return None
        floor = operation_floor(spec, flop=measured.flop, traffic_bytes=measured.traffic_bytes, dtype=measured.dtype)
    return floor.floor_s


COMMAND = Command(
    matmul,
    order=30,
    group="blocks",
    examples=("flatout matmul --shapes 4096x4096x4096", "flatout matmul --shapes 512x512x512 --dtype float32"),
)
