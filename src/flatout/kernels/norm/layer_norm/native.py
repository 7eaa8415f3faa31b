"""PyTorch's own operator: one kernel forward and one or two backward, on CPUs too.

Where a row's mean is large beside its spread (50 times, say), its gradients on CPUs lose digits: ten times the reference's
error was seen in float16, where the statistics are kept in float16 too.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.records.kernel import Kernel


def layer_norm(
    x: Tensor,
    weight_D: Tensor | None = None,
    bias_D: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result, the sum by an operator of its own."""
    summed = x if residual is None else x + residual
    normed = F.layer_norm(summed, summed.shape[-1:], weight_D, bias_D, eps)
    return normed if residual is None else (normed, summed)


def refusal(
    x: Tensor,
    weight_D: Tensor | None = None,
    bias_D: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> str | None:
    """One dtype."""
    for tensor in (weight_D, bias_D):
        if tensor is not None and tensor.dtype != x.dtype:
            return f"the weight or bias is {tensor.dtype}, x {x.dtype}; PyTorch's operator wants one dtype"
    return None


KERNEL = Kernel(
    id="norm.layer_norm.native",
    op="norm.layer_norm",
    title="PyTorch's F.layer_norm",
    module=__name__,
    run=layer_norm,
    refusal=refusal,
    order=500,
)
