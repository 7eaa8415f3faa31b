"""A linear layer with a low-rank adapter, layer and adapter multiplied apart: what the other kernels must return."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from flatout.core.parts import kernel


def reference_lora_linear(
    x: Tensor, weight: Tensor, down: Tensor, up: Tensor, bias: Tensor | None = None, *, scale: float = 1.0
) -> Tensor:
    """`x W^T + bias + scale * x down^T up^T` (arXiv 2106.09685, equation 3)."""
    return F.linear(x, weight, bias) + scale * F.linear(F.linear(x, down), up)


KERNEL = kernel(__name__, "Layer and adapter apart", reference_lora_linear, order=1000, guarantee="exact")
