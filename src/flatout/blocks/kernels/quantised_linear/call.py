"""The function `quantised_linear`, and the measurement of its variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.graph_timing import captured_calls, first_runs, graph_times, num_copies, relative_error
from flatout.blocks.kernels.nvrtc import has_early_launches
from flatout.blocks.kernels.quantised_linear.packing import PackedWeight
from flatout.blocks.kernels.quantised_linear.triton import (
    QuantisedVariant,
    proposed_variants,
    quantised_problem,
    refusal,
    run_variant,
    use_variant,
)
from flatout.blocks.kernels.selection import kernel_operator
from flatout.core.errors import UsageError

VENDOR: Final = "vendor"
"""The name of torch's own product among the measured variants."""
_FINALISTS: Final = 4
_multiply = kernel_operator(
    "quantised_linear",
    "(Tensor x, Tensor codes, Tensor? scales, Tensor? bias, *, int bits, int group, str? kernel) -> Tensor",
)


def quantised_linear(
    x: Tensor, weight: PackedWeight, bias: Tensor | None = None, *, kernel: str | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` with a weight [O, I] as `packing.pack_weight` makes it. No gradients go to the weight.

    `kernel` is the id of the implementation, by default the first that can run: `quantised_linear.triton` (up to 16 rows on a
    GPU), `.expanded`, `.reference`. Raises UsageError for sizes that do not fit, and for a kernel that cannot run them.

    >>> from flatout.blocks.kernels.quantised_linear.packing import pack_weight
    >>> quantised_linear(torch.tensor([[1.0, 2.0]]), pack_weight(torch.tensor([[127.0, -1.2]]), bits=8))
    tensor([[125.]])
    """
    inputs = weight.inputs
    if x.dim() == 0 or x.shape[-1] != inputs or not x.is_floating_point():
        raise UsageError(f"x {tuple(x.shape)} of {x.dtype} does not meet a weight of {inputs} inputs")
    form = {"bits": weight.bits, "group": weight.group, "kernel": kernel}
    y: Tensor = _multiply(x, weight.codes, weight.scales, bias, **form)
    return y


def measure_quantised_linear(
    weight: PackedWeight,
    *,
    rows: int,
    dtype: torch.dtype,
    seconds: float = 1.0,
    copies: int | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Measure seconds a product of `rows` rows, by variant, fastest first; the fastest is taken from now on in this process, with
    16 bits torch's own too.

    Each variant must first give the result of float64 as well as the expanded weight does. They are timed in captured graphs, in
    turn, over `copies` of the weight that together exceed the cache (by default 2.5 times). Raises UsageError without a GPU.
    """
    x = torch.randn((rows, weight.inputs), generator=torch.Generator().manual_seed(seed)).to(weight.codes.device, dtype)
    why = refusal(x, weight.codes, weight.scales, bits=weight.bits, group=weight.group)
    if why is not None:
        raise UsageError(f"nothing to measure: {why}")
    problem = quantised_problem(x, weight.codes, bits=weight.bits, group=weight.group)
    num = copies or num_copies(weight.num_bytes, weight.codes.device)
    weights = [weight, *(weight._replace(codes=weight.codes.clone()) for _ in range(num - 1))]
    with torch.no_grad():
        right = _accurate_variants(proposed_variants(problem), weight, x)
        race = graph_times({str(variant): _captured(variant, weights, x) for variant in right}, seconds / 2)
        best = [variant for variant in right if str(variant) in list(race)[:_FINALISTS]]
        if has_early_launches(x.device):
            best += _accurate_variants([variant._replace(is_early=True) for variant in best], weight, x)
        named: dict[str, QuantisedVariant | None] = {str(variant): variant for variant in best}
        if weight.bits == 16:
            named[VENDOR] = None
        graphs = {name: _captured(variant, weights, x) for name, variant in named.items()}
        times = {name: graph_s / len(weights) for name, graph_s in graph_times(graphs, seconds / 2).items()}
    if times:
        use_variant(problem, x.device, named[next(iter(times))])
    return times


def _accurate_variants(variants: list[QuantisedVariant], weight: PackedWeight, x: Tensor) -> list[QuantisedVariant]:
    """Those whose error against float64 is at most twice the expanded weight's, and one rounding."""
    scales = None if weight.scales is None else weight.scales.double()
    packed = weight._replace(scales=scales, codes=weight.codes.double() if weight.bits == 16 else weight.codes)
    exact = quantised_linear(x.double(), packed, kernel="quantised_linear.reference")
    usual = quantised_linear(x, weight, kernel="quantised_linear.reference")
    limit = 2 * relative_error(usual, exact) + torch.finfo(x.dtype).eps

    def is_right(variant: QuantisedVariant) -> bool:
        try:
            with torch.no_grad():  # a thread has its own
                y = run_variant(variant, x, weight.codes, weight.scales, None, bits=weight.bits, group=weight.group)
        except Exception:  # noqa: BLE001 a compiler's errors are of many kinds: tiles that do not fit the device among them
            return False
        return relative_error(y, exact) <= limit

    are_right = first_runs(is_right, variants, x.device)
    return [variant for variant, right in zip(variants, are_right, strict=True) if right]


def _captured(variant: QuantisedVariant | None, weights: list[PackedWeight], x: Tensor) -> Callable[[], object]:
    def products() -> None:
        for w in weights:
            if variant is None:
                F.linear(x, w.codes)
            else:
                run_variant(variant, x, w.codes, w.scales, None, bits=w.bits, group=w.group)

    return captured_calls(products)
