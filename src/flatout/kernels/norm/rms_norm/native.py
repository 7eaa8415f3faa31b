"""PyTorch's own operator, which is one kernel on GPUs and several on CPUs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.records.kernel import Kernel


def rms_norm(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result, the sum by an operator of its own."""
    summed = x if residual is None else x + residual
    normed = F.rms_norm(summed, summed.shape[-1:], weight_D, eps)
    return normed if residual is None else (normed, summed)


def refusal(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> str | None:
    """One dtype."""
    if weight_D is not None and weight_D.dtype != x.dtype:
        return (
            f"the weight is {weight_D.dtype}, x {x.dtype}; PyTorch's operator would return another dtype than that of x"
        )
    return None


KERNEL = Kernel(
    id="norm.rms_norm.native",
    op="norm.rms_norm",
    title="PyTorch's F.rms_norm",
    module=__name__,
    run=rms_norm,
    refusal=refusal,
    order=500,
)
