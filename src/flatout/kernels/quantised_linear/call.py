"""`quantised_linear`: checks, a choice, a call; and which way is fastest, by measurement."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.forced import kernel_for
from flatout.kernels.matmul.tiled import begins_early
from flatout.kernels.opaque import composed
from flatout.kernels.quantised_linear.packing import Packed
from flatout.kernels.quantised_linear.problem import Problem, Way, problem_of, proposed
from flatout.kernels.quantised_linear.triton import keep, refusal, run_way
from flatout.measure.timer import compare

VENDOR: Final = "vendor"
"""The name of torch's own product among the ways that are measured."""
_FINALISTS: Final = 4
_COMPILERS: Final = 8
"""Threads that compile: most of it happens outside Python's lock."""


def quantised_linear(x: Tensor, weight: Packed, bias: Tensor | None = None, *, kernel: str | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` with a weight [O, I] as `packing.pack` makes it. No gradients go to the weight.

    `kernel` is the id of the implementation, by default the first that can run: `quantised_linear.triton` (up to 16 rows on a
    GPU), `.expanded`, `.reference`. Raises UsageError for sizes that do not fit, and for a kernel that cannot run them.

    >>> from flatout.kernels.quantised_linear.packing import pack
    >>> quantised_linear(torch.tensor([[1.0, 2.0]]), pack(torch.tensor([[127.0, -1.2]]), bits=8))
    tensor([[125.]])
    """
    inputs = weight.codes.shape[1] * (2 if weight.bits == 4 else 1)
    if x.dim() == 0 or x.shape[-1] != inputs or not x.is_floating_point():
        raise UsageError(f"x {tuple(x.shape)} of {x.dtype} does not meet a weight of {inputs} inputs")
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.flatout.quantised_linear(
            x, weight.codes, weight.scales, bias, weight.bits, weight.group, kernel
        )
        return made
    return _multiplied(x, weight.codes, weight.scales, bias, weight.bits, weight.group, kernel)


@composed(
    "quantised_linear(Tensor x, Tensor codes, Tensor? scales, Tensor? bias, int bits, int group, str? kernel) -> Tensor"
)
def _multiplied(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None, bits: int, group: int, kernel: str | None
) -> Tensor:
    chosen = kernel_for("quantised_linear", kernel, x, codes, scales, bias, bits=bits, group=group)
    made: Tensor = chosen.run(x, codes, scales, bias, bits=bits, group=group)
    return made


def measure(
    weight: Packed, *, rows: int, dtype: torch.dtype, seconds: float = 1.0, copies: int | None = None, seed: int = 0
) -> dict[str, float]:
    """Seconds a product of `rows` rows, by way, fastest first; the fastest is taken from now on in this process, with
    16 bits torch's own too.

    Each way must first give the result of float64 as well as the expanded weight does. They are timed in captured graphs, in
    turn, over `copies` of the weight that together exceed the cache (by default 2.5 times). Raises UsageError without a GPU.
    """
    x = torch.randn((rows, _inputs(weight)), generator=torch.Generator().manual_seed(seed)).to(
        weight.codes.device, dtype
    )
    why = refusal(x, weight.codes, weight.scales, bits=weight.bits, group=weight.group)
    if why is not None:
        raise UsageError(f"nothing to measure: {why}")
    problem = problem_of(x, weight.codes, bits=weight.bits, group=weight.group)
    weights = _copies(weight, copies)
    with torch.no_grad():
        right = _right_ways(problem, proposed(problem), weight, x)
        race = _timed({str(way): _captured(way, weights, x) for way in right}, seconds / 2)
        best = [way for way in right if str(way) in list(race)[:_FINALISTS]]
        if begins_early(x.device):
            best += _right_ways(problem, [way._replace(is_early=True) for way in best], weight, x)
        graphs = {str(way): _captured(way, weights, x) for way in best}
        if weight.bits == 16:
            graphs[VENDOR] = _captured(None, weights, x)
        times = {name: seconds_all / len(weights) for name, seconds_all in _timed(graphs, seconds / 2).items()}
    named: dict[str, Way | None] = {str(way): way for way in best}
    if times:
        keep(problem, x.device, {**named, VENDOR: None}[next(iter(times))])
    return times


def _timed(graphs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Fastest first."""
    found = compare(graphs, device="cuda", min_time_s=seconds / 2, max_time_s=seconds) if graphs else {}
    return dict(sorted(((name, timing.call_s.value) for name, timing in found.items()), key=lambda pair: pair[1]))


def _inputs(weight: Packed) -> int:
    return weight.codes.shape[1] * (2 if weight.bits == 4 else 1)


def _copies(weight: Packed, num: int | None) -> list[Packed]:
    if num is None:
        cache = torch.cuda.get_device_properties(weight.codes.device).L2_cache_size
        num = int(2.5 * cache / weight.num_bytes) + 2
    return [weight, *(weight._replace(codes=weight.codes.clone()) for _ in range(num - 1))]


def _right_ways(problem: Problem, ways: list[Way], weight: Packed, x: Tensor) -> list[Way]:
    """Those whose error against float64 is at most twice the expanded weight's, and one rounding."""
    scales = None if weight.scales is None else weight.scales.double()
    packed = weight._replace(scales=scales, codes=weight.codes.double() if weight.bits == 16 else weight.codes)
    exact = quantised_linear(x.double(), packed, kernel="quantised_linear.reference")
    usual = quantised_linear(x, weight, kernel="quantised_linear.reference")
    limit = 2 * _error(usual, exact) + torch.finfo(x.dtype).eps

    def is_right(way: Way) -> bool:
        try:
            with torch.no_grad():  # a thread has its own
                y = run_way(way, x, weight.codes, weight.scales, None, bits=weight.bits, group=weight.group)
        except Exception:  # noqa: BLE001 a compiler's errors are of many kinds: tiles that do not fit the device among them
            return False
        return _error(y, exact) <= limit

    # A thread that has launched nothing yet has no context of the device.
    with ThreadPoolExecutor(_COMPILERS, initializer=lambda: torch.zeros(1, device=x.device)) as pool:
        return [way for way, right in zip(ways, pool.map(is_right, ways), strict=True) if right]


def _error(y: Tensor, exact: Tensor) -> float:
    error = float((y.double() - exact).norm() / exact.norm().clamp_min(1e-300))
    return error if error == error else float("inf")


def _captured(way: Way | None, weights: list[Packed], x: Tensor) -> Callable[[], object]:
    def products() -> None:
        for w in weights:
            if way is None:
                F.linear(x, w.codes)
            else:
                run_way(way, x, w.codes, w.scales, None, bits=w.bits, group=w.group)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        products()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return graph.replay
