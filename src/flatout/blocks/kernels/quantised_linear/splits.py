"""The fastest cut of a packed weight's product, by measurement."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flatout.blocks.kernels.graph_timing import captured_calls, graph_times, num_copies, relative_error
from flatout.blocks.kernels.quantised_linear.mma import (
    MmaCut,
    fitting_cuts,
    reference_packed_linear,
    run_cut,
    use_cut,
    why_no_mma_kernel,
)
from flatout.blocks.kernels.quantised_linear.mma_packing import MmaPackedWeight
from flatout.core.errors import UsageError


def measure_cuts(
    weight: MmaPackedWeight,
    *,
    rows: int = 1,
    has_norm: bool = False,
    seconds: float = 0.5,
    copies: int | None = None,
    seed: int = 0,
) -> dict[MmaCut, float]:
    """Seconds a product of `rows` rows, by cut, fastest first; the fastest is taken from now on in this process.

    Each cut must first give the result of float64 as well as torch's own operations do: one that does not raises UsageError.
    They are timed in captured graphs, in turn, over `copies` of the weight that together exceed the cache (by default 2.5 times).
    Raises UsageError without a GPU, and for more rows than a processor has room for at once.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, weight.inputs), generator=generator).to(weight.words.device, torch.bfloat16)
    norm = torch.ones_like(x[0]) if has_norm else None
    with torch.no_grad():
        why = why_no_mma_kernel(x, weight, norm)
        if why is not None:
            raise UsageError(f"nothing to measure: {why}")
        cuts = fitting_cuts(rows, weight, x.device)
        if not cuts:
            raise UsageError(
                f"nothing to measure: {rows} rows of {weight.inputs} numbers do not fit shared memory at once"
            )
        exact = reference_packed_linear(x.double(), weight, norm=None if norm is None else norm.double())
        usual = reference_packed_linear(x, weight, norm=norm)
        limit = 2 * relative_error(usual, exact) + torch.finfo(x.dtype).eps
        for cut in cuts:
            error = relative_error(run_cut(cut, x, weight, norm=norm), exact)
            if not error <= limit:
                raise UsageError(
                    f"the cut '{cut}' is {error:.3g} off float64, where {limit:.3g} is allowed; report this"
                )
        num = copies or num_copies(weight.num_bytes, x.device)
        weights = [weight, *(weight._replace(words=weight.words.clone()) for _ in range(num - 1))]
        graphs = {str(cut): captured_calls(partial(_run_all, cut, weights, x, norm)) for cut in cuts}
        seconds_of = graph_times(graphs, seconds)
    named = {str(cut): cut for cut in cuts}
    times = {named[name]: graph_s / num for name, graph_s in seconds_of.items()}
    use_cut(weight, next(iter(times)))
    return times


def _run_all(cut: MmaCut, weights: list[MmaPackedWeight], x: Tensor, norm: Tensor | None) -> None:
    for weight in weights:
        run_cut(cut, x, weight, norm=norm)
