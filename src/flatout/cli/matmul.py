"""`flatout matmul`: what a product of matrices takes on this machine, which way is taken for it, and how far the floor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flatout.cli.machine import cache_folder
from flatout.errors import FlatoutError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from flatout.kernels.matmul.problem import Problem
    from flatout.kernels.matmul.table import Measured
    from flatout.reporting.products import ProductLine


def matmul(
    shapes: Annotated[str, typer.Option(help="Measure these, as 4096x50257x768,1000x1000x1000: M x N x K.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the operands.")] = "bfloat16",
    layout: Annotated[str, typer.Option(help="nn; nt for a linear layer's weight; tn, tt: as in BLAS.")] = "nn",
    kept: Annotated[bool, typer.Option("--kept", help="The second operand is a weight: copies are made once.")] = False,
    bias: Annotated[bool, typer.Option("--bias", help="A bias is added.")] = False,
    activation: Annotated[str, typer.Option(help="relu, silu, gelu or gelu_tanh follows.")] = "",
    residual: Annotated[bool, typer.Option("--residual", help="Another matrix is added.")] = False,
    precision: Annotated[str, typer.Option(help="float32: allow products of coarser types of that accuracy.")] = "",
    compiled: Annotated[bool, typer.Option("--compiled", help="Measure torch.compile's templates, too.")] = False,
    device: Annotated[str, typer.Option(help="cuda or cpu; the GPU if there is one.")] = "",
) -> None:
    """Measure products and keep the times, or show what is kept. Programs take from then on what was fastest."""
    import torch

    from flatout.kernels.matmul import choosing, table
    from flatout.kernels.matmul.problem import Epilogue, plain_problem
    from flatout.reporting.products import product_text

    console, notes = Console(soft_wrap=True, highlight=False), Console(stderr=True)
    table.keep_in(cache_folder())
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    follows = Epilogue(bias, activation or None, residual)  # type: ignore[arg-type]
    entries: list[Measured] = []
    for m, n, k in _sizes(shapes):
        problem: Problem = plain_problem(
            m,
            n,
            k,
            dtype=_dtype(dtype),
            device=where,
            layout=layout,
            is_kept=kept,
            epilogue=follows,
            precision=precision or None,  # type: ignore[arg-type]
        )
        entries.append(choosing.measure(problem, has_compiled=compiled))
    for measured in entries or table.table_of(where).entries.values():
        for line in _lines(measured, where):
            console.print(product_text(line), markup=False)
    if not shapes and not table.table_of(where).entries:
        notes.print("nothing is kept yet; measure with --shapes MxNxK", style="dim")
    notes.print(f"kept in {table.path_of(where)}", style="dim")


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


def _lines(measured: Measured, where: torch.device) -> Iterator[ProductLine]:
    """One for calls, one for the device where it has a clock of its own. Of the tiles the best is shown."""
    from flatout.kernels.matmul.table import fastest
    from flatout.reporting.products import ProductLine

    floor_s = _floor_s(measured, where)
    for clock in ("device", "call"):
        taken = fastest(measured, is_captured=clock == "device").way
        times: dict[str, tuple[str, float]] = {}
        for row in measured.rows:
            estimate = row.device if clock == "device" else row.call
            if estimate is None:
                continue
            best = times.get(row.way.name)
            if best is None or row.way == taken or (best[0] != str(taken) and estimate.value < best[1]):
                times[row.way.name] = str(row.way), estimate.value
        if times:
            yield ProductLine(measured.problem, clock, list(times.values()), str(taken), floor_s)


def _floor_s(measured: Measured, where: torch.device) -> float | None:
    """By the ceilings measured on this machine, else the data sheet's; None where neither is known."""
    from flatout.cost.roofline import operation_floor
    from flatout.hardware import catalog
    from flatout.measure import cache, probe

    identity = probe.identify(where)
    try:
        machine = cache.read(cache_folder(), identity)
        floor = operation_floor(machine, flop=measured.flop, traffic_bytes=measured.traffic_bytes, dtype=measured.dtype)
    except FlatoutError:
        spec = catalog.match(identity.device_name)
        if spec is None:
            return None
        floor = operation_floor(spec, flop=measured.flop, traffic_bytes=measured.traffic_bytes, dtype=measured.dtype)
    return floor.floor_s
