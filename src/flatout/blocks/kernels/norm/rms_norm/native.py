"""PyTorch's own operator, which is one kernel on GPUs and several on CPUs."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.core.parts import kernel


def native_rms_norm(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result, the sum by an operator of its own."""
    summed = x if residual is None else x + residual
    normed = F.rms_norm(summed, summed.shape[-1:], weight_D, eps)
    return normed if residual is None else (normed, summed)


def refusal(x: Tensor, *vectors: Tensor | None, **options: object) -> str | None:
    """Why PyTorch's operators, of both norms, do not take these dtypes; None if they do."""
    for tensor in (*vectors, *options.values()):
        if isinstance(tensor, Tensor) and tensor.dtype != x.dtype:
            return f"a weight or bias is {tensor.dtype}, x {x.dtype}; PyTorch's operators want one dtype"
    return None


KERNEL = kernel(__name__, "PyTorch's F.rms_norm", native_rms_norm, order=500, refusal=refusal)
