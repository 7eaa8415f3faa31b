"""The specification of a product: torch's operators, one after the other."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.matmul.problem import Activation, Precision, Strides
from flatout.core.parts import kernel

LARGEST: Final = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
"""What quantised numbers saturate at (OCP 8-bit floating point specification, revision 1.0; int8 is kept symmetric)."""


def multiplied(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    activation: Activation | None = None,
    precision: Precision | None = None,
    out_dtype: torch.dtype | None = None,
    strides: Strides = "contiguous",
) -> Tensor:
    """The product scale * (activation(a @ b + bias) + residual) in `out_dtype`, by default a's; each step rounds to a's type.

    `a` is (M, K), `b` (K, N), `bias` (N,), `residual` (M, N), `scale` float32 of one number or M. An `out_dtype` of 8 bits
    saturates, int8 rounds to the nearest, halves to the even one. `precision` and `strides` allow what is done here anyway.
    """
    return finished(
        a @ b, bias=bias, activation=activation, residual=residual, scale=scale, out_dtype=out_dtype or a.dtype
    )


def finished(
    product: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Apply the epilogue to the sum (M, N)."""
    out = product if bias is None else product + bias
    out = activated(out, activation)
    out = out if residual is None else out + residual
    if scale is not None or out_dtype in LARGEST:
        out = out.to(torch.promote_types(out.dtype, torch.float32))
    if scale is not None:
        out = out * scale.reshape(-1, 1)
    if out_dtype in LARGEST:
        largest = LARGEST[out_dtype]
        out = out.clamp(-largest, largest)
        out = out.round() if out_dtype == torch.int8 else out
    return out.to(out_dtype)


def activated(x: Tensor, activation: Activation | None) -> Tensor:
    """Apply the activation to x; `gelu_tanh` is the approximation by tanh."""
    if activation is None:
        return x
    if activation.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return F.relu(x) if activation == "relu" else F.silu(x)


KERNEL = kernel(__name__, "torch's operators, one after the other", multiplied, order=1000)
