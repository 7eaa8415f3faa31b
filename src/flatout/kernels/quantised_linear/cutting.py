"""Which cut of a laid weight's product is fastest, by measurement."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.quantised_linear.laid import Cut, fitting, keep, reference, run_cut, why_not_fast
from flatout.kernels.quantised_linear.laying import Laid
from flatout.measure.timer import compare


def measure_cuts(
    weight: Laid,
    *,
    rows: int = 1,
    has_norm: bool = False,
    seconds: float = 0.5,
    copies: int | None = None,
    seed: int = 0,
) -> dict[Cut, float]:
    """Seconds a product of `rows` rows, by cut, fastest first; the fastest is taken from now on in this process.

    Each cut must first give the result of float64 as well as torch's own operations do: one that does not raises UsageError.
    They are timed in captured graphs, in turn, over `copies` of the weight that together exceed the cache (by default 2.5 times).
    Raises UsageError without a GPU, and for more rows than a processor has room for at once.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, weight.inputs), generator=generator).to(weight.words.device, torch.bfloat16)
    norm = torch.ones_like(x[0]) if has_norm else None
    with torch.no_grad():
        why = why_not_fast(x, weight, norm)
        if why is not None:
            raise UsageError(f"nothing to measure: {why}")
        cuts = fitting(rows, weight, x.device)
        if not cuts:
            raise UsageError(
                f"nothing to measure: {rows} rows of {weight.inputs} numbers do not fit shared memory at once"
            )
        _check(cuts, x, weight, norm)
        weights = _copies(weight, copies)
        graphs = {str(cut): _captured(cut, weights, x, norm) for cut in cuts}
        found = compare(graphs, device="cuda", min_time_s=seconds / 2, max_time_s=seconds)
    times = {cut: found[str(cut)].call_s.value / len(weights) for cut in cuts}
    times = dict(sorted(times.items(), key=lambda pair: pair[1]))
    keep(weight, next(iter(times)))
    return times


def _check(cuts: list[Cut], x: Tensor, weight: Laid, norm: Tensor | None) -> None:
    exact = reference(x.double(), weight, norm=None if norm is None else norm.double())
    limit = 2 * _error(reference(x, weight, norm=norm), exact) + torch.finfo(x.dtype).eps
    for cut in cuts:
        error = _error(run_cut(cut, x, weight, norm=norm), exact)
        if not error <= limit:
            raise UsageError(f"the cut '{cut}' is {error:.3g} off float64, where {limit:.3g} is allowed; report this")


def _error(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def _copies(weight: Laid, num: int | None) -> list[Laid]:
    if num is None:
        cache = torch.cuda.get_device_properties(weight.words.device).L2_cache_size
        num = int(2.5 * cache / weight.num_bytes) + 2
    return [weight, *(weight._replace(words=weight.words.clone()) for _ in range(num - 1))]


def _captured(cut: Cut, weights: list[Laid], x: Tensor, norm: Tensor | None) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run_cut(cut, x, weight, norm=norm)
    return graph.replay
