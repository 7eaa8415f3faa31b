"""One Triton kernel forward and one backward; halves of a packed projection are read and written where they are.

R rows, D width
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, Final

from torch import Tensor

from flatout.blocks.kernels.opaque import opaque, with_dense_rows
from flatout.blocks.kernels.selection import no_triton
from flatout.blocks.kernels.swiglu.reference import GatingPasses, backward_shapes, forward_shapes, gated
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.swiglu.on_device.gating"
_BLOCK: Final = 4096
"""Numbers of a program: 16 a thread with 8 warps."""


@opaque("swiglu_triton(Tensor gate, Tensor? up) -> Tensor", forward_shapes)
def _forward(gate: Tensor, up: Tensor | None) -> Tensor:
    result = forward_shapes(gate, up)
    gate_RD, up_RD = _rows(gate, up)
    if result.numel():
        rows = (gate_RD, up_RD)
        _launch("swiglu_forward", gate_RD, *rows, result, *(t.stride(0) for t in rows))
    return result


@opaque("swiglu_triton_backward(Tensor grad, Tensor gate, Tensor? up) -> Tensor[]", backward_shapes)
def _backward(grad: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    result = backward_shapes(grad, gate, up)
    gate_RD, up_RD = _rows(gate, up)
    into_gate_RD, into_up_RD = _rows(result[0], None if up is None else result[1])
    if grad.numel():
        rows = (with_dense_rows(grad.reshape(-1, grad.shape[-1])), gate_RD, up_RD, into_gate_RD)
        _launch("swiglu_backward", gate_RD, *rows, into_up_RD, *(t.stride(0) for t in rows))
    return result


def _rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, ...]:
    """Gate and up as rows, of the one tensor or the two."""
    rows = [with_dense_rows(t.reshape(math.prod(t.shape[:-1]), t.shape[-1])) for t in (gate, up) if t is not None]
    return rows[0].chunk(2, dim=-1) if up is None else tuple(rows)


def _launch(kernel: str, gate_RD: Tensor, *args: Any) -> None:
    """Run a kernel over rows of the gate's number and width."""
    num_rows, width = gate_RD.shape
    block = min(_BLOCK, 1 << (width - 1).bit_length())
    on_grid: Any = getattr(import_module(_SOURCE), kernel)[num_rows, math.ceil(width / block)]
    on_grid(*args, width, BLOCK=block, num_warps=max(1, min(8, block // 512)))


KERNEL = kernel(
    __name__,
    "One Triton kernel forward, one backward",
    partial(gated, GatingPasses(_forward, _backward)),
    order=100,
    refusal=no_triton,
)
