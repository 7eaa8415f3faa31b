"""A linear layer with a packed weight: what the other kernels must return."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.quantised_linear.packing import GROUP, expanded
from flatout.records.kernel import Kernel

# M rows, O outputs, I inputs


def quantised_linear(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> Tensor:
    """`F.linear(x, weight, bias)` with the weight [O, I] of the codes in x's dtype; see `packing` for how they lie."""
    return F.linear(x, expanded(codes, scales, bits=bits, group=group, dtype=x.dtype), bias)


def refusal(*arguments: object, **options: object) -> None:
    """It takes everything."""


KERNEL = Kernel(
    id="quantised_linear.reference",
    op="quantised_linear",
    title="The weight expanded, then torch's product",
    module=__name__,
    run=quantised_linear,
    refusal=refusal,
    order=1000,
)
