"""PyTorch's own operator: one kernel forward and one or two backward, on CPUs too.

Where a row's mean is large beside its spread (50 times, say), its gradients on CPUs lose digits: ten times the reference's
error was seen in float16, where the statistics are kept in float16 too.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.norm.rms_norm.native import refusal
from flatout.blocks.kernels.opaque import Side
from flatout.core.parts import kernel


def native_layer_norm(
    x: Tensor, weight_D: Side = None, bias_D: Side = None, residual: Side = None, *, eps: float = 1e-5
) -> Tensor | tuple[Tensor, Tensor]:
    """The reference's result, the sum by an operator of its own."""
    summed = x if residual is None else x + residual
    normed = F.layer_norm(summed, summed.shape[-1:], weight_D, bias_D, eps)
    return normed if residual is None else (normed, summed)


KERNEL = kernel(__name__, "PyTorch's F.layer_norm", native_layer_norm, order=500, refusal=refusal)
