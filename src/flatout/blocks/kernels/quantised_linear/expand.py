"""A packed weight expanded into memory that is there already: by one Triton kernel on a GPU, by torch elsewhere."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.matmul.launch import TritonLaunch
from flatout.blocks.kernels.quantised_linear.packing import GROUP, expanded
from flatout.blocks.kernels.quantised_linear.triton import why_not_cut
from flatout.blocks.kernels.selection import no_triton
from flatout.core.errors import UsageError
from flatout.core.parts import kernel

_BLOCK: Final = 1024
"""Bytes or numbers of a program: 8 a thread with 4 warps."""


def expand_into(out_OI: Tensor, codes: Tensor, scales: Tensor | None, *, bits: int, group: int = GROUP) -> Tensor:
    """`packing.expanded` in `out_OI`'s dtype, written there; on a GPU nothing is allocated.

    Raises UsageError on a GPU without Triton.
    """
    if out_OI.device.type != "cuda":
        return out_OI.copy_(expanded(codes, scales, bits=bits, group=group, dtype=out_OI.dtype))
    why = no_triton(codes)
    if why is not None:
        raise UsageError(f"a packed weight cannot be expanded on '{out_OI.device}': {why}; install triton")
    if out_OI.numel():
        depth = out_OI.shape[1]
        launch = _bound(out_OI.shape[0], depth, bits, group, out_OI.dtype, codes.dtype, out_OI.device)
        launch(codes, scales, out_OI, out_OI.shape[0], depth, bits, group, _BLOCK)
    return out_OI


@lru_cache(maxsize=1024)
def _bound(rows: int, depth: int, bits: int, *form: object) -> TritonLaunch:
    source: Any = import_module("flatout.blocks.kernels.quantised_linear.on_device.skinny")
    return TritonLaunch(source.expand, (rows, -(-(depth // 2 if bits == 4 else depth) // _BLOCK), 1), num_warps=4)


def run(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> Tensor:
    """The reference's result, for many rows: the weight is expanded for the call."""
    if bits == 16:
        return F.linear(x, codes, bias)
    weight = torch.empty((codes.shape[0], x.shape[-1]), dtype=x.dtype, device=x.device)
    return F.linear(x, expand_into(weight, codes, scales, bits=bits, group=group), bias)


def refusal(
    x: Tensor, codes: Tensor, scales: Tensor | None, bias: Tensor | None = None, *, bits: int, group: int = GROUP
) -> str | None:
    """GPUs; torch's compiler does it itself."""
    if torch.compiler.is_compiling():
        return "torch's compiler expands the weight itself"
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are recorded, and the expanded weight is not saved for them"
    return no_triton(x, codes) or why_not_cut(x.shape[-1], group, codes)


KERNEL = kernel(
    __name__,
    "The weight expanded by a kernel, then the vendor's product",
    run,
    order=200,
    refusal=refusal,
    name="expanded",
)
