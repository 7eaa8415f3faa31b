"""Measures every way of a problem: right first, then fast; in turn, on random inputs that rotate through more than the cache.

M rows of a, N columns of b, K depth
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from math import ceil
from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.kernels.matmul.packing import Packed, matrix_of
from flatout.kernels.matmul.problem import Problem, name_of
from flatout.kernels.matmul.reference import LARGEST, finished
from flatout.kernels.matmul.table import Measured, Row
from flatout.kernels.matmul.vendor import VENDOR
from flatout.kernels.matmul.way import Runner, Way
from flatout.kernels.matmul.ways import bound, ways_of
from flatout.measure.stats import Estimate
from flatout.measure.timer import Timing, compare

_FINALISTS: Final = 4
"""Tiles that are timed thoroughly, of those timed at all."""
_CACHES: Final = 2.5
"""Inputs fill the last-level cache so many times over, so that each call reads memory as a program's does."""
_MOST_SETS: Final = 32
_CAPTURED: Final = 24
"""Calls in a captured graph: the graph's own launch, about 10 us, is spread over them."""
_COMPILERS: Final = 8
"""Threads that compile: most of it happens outside Python's lock."""
_CALLS: Final = 20
"""Calls that are timed as one: a single call's time holds the wait until the device begins."""


class Inputs(NamedTuple):
    """What a runner takes."""

    a: Tensor
    b: Tensor | Packed
    bias: Tensor | None
    residual: Tensor | None
    scale: Tensor | None


class _Tried(NamedTuple):
    runner: Runner
    error: float


def measured(problem: Problem, *, has_compiled: bool = False, seconds: float = 1.0, seed: int = 0) -> Measured:
    """Every way that gives the right result, timed. Uses memory for a few sets of operands; leaves torch's random state alone.

    A way is right when its error against float64 is at most twice the vendor's and one rounding, with the strides that were asked
    for, and twice the same.
    """
    with torch.no_grad():
        found = ways_of(problem, has_compiled=has_compiled)
        sets = drawn(problem, seed=seed)
        tried, wrong = _checked(problem, found.ways, sets[0])
        rows = _timed(tried, sets, seconds=seconds, is_cuda=problem.device.type == "cuda")
    return Measured(
        problem=str(problem),
        flop=problem.flop,
        traffic_bytes=problem.traffic_bytes,
        dtype=name_of(problem.dtype),
        rows=rows,
        refused={**dict(found.refusals), **wrong},
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def drawn(problem: Problem, *, seed: int, most: int = _MOST_SETS) -> list[Inputs]:
    """Sets of random operands that lie as the problem's; one on a CPU, whose caches a program shares with itself anyway."""
    generator = torch.Generator(problem.device).manual_seed(seed)
    if problem.device.type != "cuda":
        return [_set(problem, generator)]
    cache = torch.cuda.get_device_properties(problem.device).L2_cache_size
    num = ceil(_CACHES * cache / max(problem.traffic_bytes, 1.0))
    return [_set(problem, generator) for _ in range(max(2, min(num, most)))]


def exact(problem: Problem, x: Inputs) -> Tensor:
    """The result in float64; of 8 bits only the range is kept."""
    wide = [None if t is None else t.double() for t in (x.bias, x.residual, x.scale)]
    product = x.a.double() @ matrix_of(x.b).double()
    activation, float64 = problem.epilogue.activation, torch.float64
    out = finished(product, bias=wide[0], activation=activation, residual=wide[1], scale=wide[2], out_dtype=float64)
    largest = LARGEST.get(problem.out_dtype)
    return out if largest is None else out.clamp(-largest, largest)


def relative_error(out: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over that of what is wanted; infinite where it is not a number."""
    size = float(wanted.norm())
    error = float((out.double() - wanted).norm()) / (size or 1.0)
    return error if error == error else float("inf")


def _set(problem: Problem, generator: torch.Generator) -> Inputs:
    m, n, k = problem.m, problem.n, problem.k

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=problem.device).to(problem.dtype)

    def laid(rows: int, columns: int, by_rows: bool, stride: int) -> Tensor:
        stored = normal(rows, stride)[:, :columns] if by_rows else normal(columns, stride)[:, :rows]
        return stored if by_rows else stored.T

    epilogue = problem.epilogue
    b = laid(k, n, problem.b_rows, problem.b_stride)
    size = {"rows": (m,), "tensor": ()}.get(epilogue.scale or "")
    return Inputs(
        laid(m, k, problem.a_rows, problem.a_stride),
        Packed(b) if problem.is_kept else b,
        normal(n) if epilogue.has_bias else None,
        normal(m, n) if epilogue.has_residual else None,
        None if size is None else torch.rand(size, generator=generator, device=problem.device),
    )


def _checked(problem: Problem, ways: tuple[Way, ...], x: Inputs) -> tuple[dict[Way, _Tried], dict[str, str]]:
    wanted = exact(problem, x)
    usual, wrong = relative_error(bound(problem, VENDOR)(*x), wanted), {}
    rounding = torch.finfo(problem.dtype).eps
    tried: dict[Way, _Tried] = {}
    for way, outcome in zip(ways, _first_runs(problem, ways, x), strict=True):
        if isinstance(outcome, str):
            wrong[str(way)] = outcome
            continue
        runner, out = outcome
        error = relative_error(out, wanted)
        if not error <= 2 * usual + rounding:
            wrong[str(way)] = f"wrong: its error is {error:.1e}, the library's {usual:.1e}"
        elif problem.strides == "contiguous" and not out.is_contiguous():
            wrong[str(way)] = f"wrong: its strides are {out.stride()}"
        elif way.tile is not None and not torch.equal(runner(*x), out):
            wrong[str(way)] = "wrong: two runs differ"
        else:
            tried[way] = _Tried(runner, error)
    return tried, wrong


def _first_runs(problem: Problem, ways: tuple[Way, ...], x: Inputs) -> list[tuple[Runner, Tensor] | str]:
    def first(way: Way) -> tuple[Runner, Tensor] | str:
        try:
            with torch.no_grad():  # a thread has its own
                runner = bound(problem, way)
                return runner, runner(*x)
        except Exception as e:  # noqa: BLE001 a compiler's errors are of many kinds; they are kept with the way
            return f"failed: {type(e).__name__}: {str(e).strip().splitlines()[-1][:200] if str(e).strip() else ''}"

    alone = [first(way) for way in ways if way.tile is None]
    is_cuda = problem.device.type == "cuda"
    # A thread that has launched nothing yet has no context of the device, without which no descriptor can be made.
    begin = partial(torch.zeros, 1, device=problem.device)
    with ThreadPoolExecutor(_COMPILERS if is_cuda else 1, initializer=begin) as pool:
        tiled = list(pool.map(first, [way for way in ways if way.tile is not None]))
    return [(alone if way.tile is None else tiled).pop(0) for way in ways]


def _timed(tried: dict[Way, _Tried], sets: list[Inputs], *, seconds: float, is_cuda: bool) -> tuple[Row, ...]:
    device = "cuda" if is_cuda else "cpu"
    devices: dict[Way, Timing] = {}
    finalists = list(tried)
    num = _CAPTURED // len(sets) * len(sets) or len(sets)
    if is_cuda:
        graphs = {way: _captured(one.runner, sets, num) for way, one in tried.items()}
        finalists = _finalists(graphs, seconds)
        named = {str(way): graphs[way] for way in finalists}
        timings = compare(named, device=device, min_time_s=seconds / 2, max_time_s=4 * seconds)
        devices = {way: timings[str(way)] for way in finalists}
        del graphs, named
    times = _CALLS if is_cuda else 1
    calls = {str(way): _rotating(tried[way].runner, sets, times) for way in finalists}
    found = compare(calls, device=device, min_time_s=seconds / 2, max_time_s=4 * seconds)
    return tuple(
        Row(
            way=way,
            call=_scaled(found[str(way)].call_s, times) if way in finalists else None,
            device=_scaled(devices[way].call_s, num) if way in devices else None,
            call_ratio=found[str(way)].ratio if way in finalists else None,
            device_ratio=devices[way].ratio if way in devices else None,
            error=one.error,
        )
        for way, one in tried.items()
    )


def _finalists(graphs: dict[Way, Callable[[], object]], seconds: float) -> list[Way]:
    """The vendor's first, what is no tile, and the best tiles of a short race."""
    race = compare(
        {str(w): g for w, g in graphs.items()}, device="cuda", min_time_s=seconds / 8, max_time_s=2 * seconds
    )
    tiles = sorted((w for w in graphs if w.tile is not None), key=lambda w: race[str(w)].call_s.value)
    return [*(w for w in graphs if w.tile is None), *tiles[:_FINALISTS]]


def _captured(run: Runner, sets: list[Inputs], num: int) -> Callable[[], object]:
    """`num` calls in a graph, after one of each outside it: what is compiled or packed at a first call must not be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for x in sets:
            run(*x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num):
            run(*sets[i % len(sets)])
    return graph.replay


def _rotating(run: Runner, sets: list[Inputs], times: int) -> Callable[[], object]:
    turn = 0

    def call() -> None:
        nonlocal turn
        for _ in range(times):
            turn = (turn + 1) % len(sets)
            run(*sets[turn])

    return call


def _scaled(estimate: Estimate, num: int) -> Estimate:
    return Estimate(
        value=estimate.value / num,
        low=estimate.low / num,
        high=estimate.high / num,
        confidence=estimate.confidence,
        num_samples=estimate.num_samples,
    )
