"""Division by the root of the mean square: what the other kernels must return.

D width
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.core.parts import kernel


def reference_rms_norm(
    x: Tensor, weight_D: Tensor | None = None, residual: Tensor | None = None, *, eps: float = 1e-6
) -> Tensor | tuple[Tensor, Tensor]:
    """`s / sqrt(mean(s^2) + eps) * weight` of s = x + residual, and s itself where there is a residual.

    s is rounded to the dtype of x. All that follows is float32 (float64 for float64) and rounded once, to the dtype of x.
    """
    summed = x if residual is None else x + residual
    wide = summed.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight_D is not None:
        normed = normed * weight_D.to(wide.dtype)
    normed = normed.to(x.dtype)
    return normed if residual is None else (normed, summed)


KERNEL = kernel(__name__, "Operator by operator", reference_rms_norm, order=1000, guarantee="exact")
