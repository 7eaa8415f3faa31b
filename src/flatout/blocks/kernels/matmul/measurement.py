"""Measures every variant of a problem: first that it is right, then its time, on random inputs that exceed the cache.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from math import ceil
from typing import Final, NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from flatout.blocks.kernels.graph_timing import CACHES, captured_calls, first_runs, relative_error
from flatout.blocks.kernels.matmul.implementation import bound, variants_of
from flatout.blocks.kernels.matmul.packing import Packed, matrix_of
from flatout.blocks.kernels.matmul.problem import MatmulProblem, name_of
from flatout.blocks.kernels.matmul.reference import LARGEST, multiplied
from flatout.blocks.kernels.matmul.table import MeasuredProblem, MeasuredVariant
from flatout.blocks.kernels.matmul.variant import MatmulInputs, Runner, Variant
from flatout.blocks.kernels.matmul.vendor import VENDOR
from flatout.machine.measure.stats import Estimate
from flatout.machine.measure.timer import Timing, compare_times

_FINALISTS: Final = 4
"""Tiles that are timed thoroughly, of those timed at all."""
_MOST_SETS: Final = 32
_SECONDS: Final = 1.0
"""That the timing of a problem takes, and at most four times as long."""
_CAPTURED: Final = 24
"""Calls in a captured graph: the graph's own launch, about 10 us, is spread over them."""
_CALLS: Final = 20
"""Calls that are timed as one: a single call's time holds the wait until the device begins."""


class _Tried(NamedTuple):
    runner: Runner
    error: float


def measured_problem(problem: MatmulProblem, *, has_compiled: bool = False) -> MeasuredProblem:
    """Time every variant that gives the right result, in memory for a few sets of operands; torch's random state stays.

    A variant is right when its error against float64 is at most twice the vendor's and one rounding, with the strides that the
    problem asks for, and the same in two runs.
    """
    with torch.no_grad():
        found = variants_of(problem, has_compiled=has_compiled)
        sets = _drawn(problem)
        tried, wrong = _checked(problem, found.variants, sets[0])
        rows = _timed(tried, sets, is_cuda=problem.device.type == "cuda")
    return MeasuredProblem(
        problem=str(problem),
        flop=problem.flop,
        traffic_bytes=problem.traffic_bytes,
        dtype=name_of(problem.dtype),
        rows=rows,
        refused={**dict(found.refusals), **wrong},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _drawn(problem: MatmulProblem) -> list[MatmulInputs]:
    """Sets of random operands with the problem's layout; one on a CPU, whose caches a program shares with itself anyway."""
    generator = torch.Generator(problem.device).manual_seed(0)
    if problem.device.type != "cuda":
        return [_set(problem, generator)]
    cache = torch.cuda.get_device_properties(problem.device).L2_cache_size
    num = ceil(CACHES * cache / max(problem.traffic_bytes, 1.0))
    return [_set(problem, generator) for _ in range(max(2, min(num, _MOST_SETS)))]


def float64_result(problem: MatmulProblem, x: MatmulInputs) -> Tensor:
    """The result in float64, clamped to the range of a result of 8 bits."""
    bias, residual, scale = (None if t is None else t.double() for t in x[2:])
    out = multiplied(
        x.a.double(), matrix_of(x.b).double(), bias, residual, scale, activation=problem.epilogue.activation
    )
    largest = LARGEST.get(problem.out_dtype)
    return out if largest is None else out.clamp(-largest, largest)


def _set(problem: MatmulProblem, generator: torch.Generator) -> MatmulInputs:
    m, n, k = problem.m, problem.n, problem.k

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=problem.device).to(problem.dtype)

    def strided(rows: int, columns: int, by_rows: bool, stride: int) -> Tensor:
        stored = normal(rows, stride)[:, :columns] if by_rows else normal(columns, stride)[:, :rows]
        return stored if by_rows else stored.T

    epilogue = problem.epilogue
    b = strided(k, n, problem.b_rows, problem.b_stride)
    size = {"rows": (m,), "tensor": ()}.get(epilogue.scale or "")
    return MatmulInputs(
        strided(m, k, problem.a_rows, problem.a_stride),
        Packed(b) if problem.is_constant else b,
        normal(n) if epilogue.has_bias else None,
        normal(m, n) if epilogue.has_residual else None,
        None if size is None else torch.rand(size, generator=generator, device=problem.device),
    )


def _checked(
    problem: MatmulProblem, variants: tuple[Variant, ...], x: MatmulInputs
) -> tuple[dict[Variant, _Tried], dict[str, str]]:
    wanted = float64_result(problem, x)
    usual, wrong = relative_error(bound(problem, VENDOR)(*x), wanted), {}
    rounding = torch.finfo(problem.dtype).eps
    tried: dict[Variant, _Tried] = {}
    for variant, outcome in zip(variants, _first_runs(problem, variants, x), strict=True):
        if isinstance(outcome, str):
            wrong[str(variant)] = outcome
            continue
        runner, out = outcome
        error = relative_error(out, wanted)
        if not error <= 2 * usual + rounding:
            wrong[str(variant)] = f"wrong: its error is {error:.1e}, the library's {usual:.1e}"
        elif problem.strides == "contiguous" and not out.is_contiguous():
            wrong[str(variant)] = f"wrong: its strides are {out.stride()}"
        elif variant.tile is not None and not torch.equal(runner(*x), out):
            wrong[str(variant)] = "wrong: two runs differ"
        else:
            tried[variant] = _Tried(runner, error)
    return tried, wrong


def _first_runs(
    problem: MatmulProblem, variants: tuple[Variant, ...], x: MatmulInputs
) -> list[tuple[Runner, Tensor] | str]:
    def first(variant: Variant) -> tuple[Runner, Tensor] | str:
        try:
            with torch.no_grad():  # a thread has its own
                runner = bound(problem, variant)
                return runner, runner(*x)
        except Exception as e:  # noqa: BLE001 a compiler's errors are of many kinds; they are reported with the variant
            return f"failed: {type(e).__name__}: {str(e).strip().splitlines()[-1][:200] if str(e).strip() else ''}"

    alone = [first(variant) for variant in variants if variant.tile is None]
    tiled = first_runs(first, [variant for variant in variants if variant.tile is not None], problem.device)
    return [(alone if variant.tile is None else tiled).pop(0) for variant in variants]


def _timed(tried: dict[Variant, _Tried], sets: list[MatmulInputs], *, is_cuda: bool) -> tuple[MeasuredVariant, ...]:
    device, named = "cuda" if is_cuda else "cpu", {str(variant): one for variant, one in tried.items()}
    devices: dict[str, Timing] = {}
    num, times = _CAPTURED // len(sets) * len(sets) or len(sets), _CALLS if is_cuda else 1
    if is_cuda:
        graphs = {name: captured_calls(_rotating(one.runner, sets, num)) for name, one in named.items()}
        race = compare_times(graphs, device=device, min_time_s=_SECONDS / 8, max_time_s=2 * _SECONDS)
        tiles = sorted((v for v in tried if v.tile is not None), key=lambda v: race[str(v)].call_s.value)
        # The vendor's first, what is no tile, and the best tiles of a short race.
        finalists = [str(v) for v in (*(v for v in tried if v.tile is None), *tiles[:_FINALISTS])]
        graphs, named = {name: graphs[name] for name in finalists}, {name: named[name] for name in finalists}
        devices = compare_times(graphs, device=device, min_time_s=_SECONDS / 2, max_time_s=4 * _SECONDS)
        del graphs
    calls = {name: _rotating(one.runner, sets, times) for name, one in named.items()}
    found = compare_times(calls, device=device, min_time_s=_SECONDS / 2, max_time_s=4 * _SECONDS)
    return tuple(
        MeasuredVariant(
            variant=variant,
            error=one.error,
            **_clock("call", found.get(str(variant)), times),
            **_clock("device", devices.get(str(variant)), num),
        )
        for variant, one in tried.items()
    )


def _clock(name: str, timing: Timing | None, num: int) -> dict[str, Estimate | None]:
    """The fields of MeasuredVariant by one clock, of `num` calls that were timed as one."""
    if timing is None:
        return {}
    s = timing.call_s
    call_s = structs.replace(s, value=s.value / num, low=s.low / num, high=s.high / num)
    return {name: call_s, f"{name}_ratio": timing.ratio}


def _rotating(run: Runner, sets: list[MatmulInputs], times: int) -> Callable[[], object]:
    last = 0

    def call() -> None:
        nonlocal last
        for _ in range(times):
            last = (last + 1) % len(sets)
            run(*sets[last])

    return call
