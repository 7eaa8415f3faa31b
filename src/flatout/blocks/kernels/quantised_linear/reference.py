"""A linear layer with a packed weight: what the other kernels must return."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.quantised_linear.packing import GROUP, expanded
from flatout.core.parts import kernel

# M rows, O outputs, I inputs


def reference_quantised_linear(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> Tensor:
    """`F.linear(x, weight, bias)` with the weight [O, I] of the codes in x's dtype; see `packing` for how they lie."""
    return F.linear(x, expanded(codes, scales, bits=bits, group=group, dtype=x.dtype), bias)


KERNEL = kernel(__name__, "The weight expanded, then torch's product", reference_quantised_linear, order=1000)
