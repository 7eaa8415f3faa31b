"""SwiGLU: what the other kernels must return."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.records.kernel import Kernel


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """`gate * sigmoid(gate) * up`, in float32 (float64 for float64), rounded once; without `up`, of the halves of `gate`."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate, dtype = gate.to(wide), gate.dtype
    return (gate * torch.sigmoid(gate) * up.to(wide)).to(dtype)


def refusal(*arguments: object, **options: object) -> None:
    """It takes everything."""


KERNEL = Kernel(
    id="swiglu.reference",
    op="swiglu",
    title="Operator by operator",
    module=__name__,
    run=swiglu,
    refusal=refusal,
    order=1000,
    guarantee="exact",
)
