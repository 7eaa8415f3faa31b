"""One Triton kernel each way; halves of a packed projection are read and written where they are.

R rows, D width
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, Final

from torch import Tensor

from flatout.kernels.forced import no_triton
from flatout.kernels.opaque import opaque
from flatout.kernels.swiglu.gating import Way, backward_shapes, forward_shapes, gated
from flatout.records.kernel import Kernel

_SOURCE: Final = "flatout.kernels.swiglu.on_device.gating"
_BLOCK: Final = 4096
"""Numbers of a program: 16 a thread with 8 warps."""


@opaque("swiglu_triton(Tensor gate, Tensor? up) -> Tensor", forward_shapes)
def _forward(gate: Tensor, up: Tensor | None) -> Tensor:
    made = forward_shapes(gate, up)
    gate_RD, up_RD = _rows(gate, up)
    if made.numel():
        grid, block = _grid(gate_RD)
        source: Any = import_module(_SOURCE)
        source.forward[grid](
            gate_RD,
            up_RD,
            made,
            gate_RD.stride(0),
            up_RD.stride(0),
            gate_RD.shape[1],
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return made


@opaque("swiglu_triton_backward(Tensor grad, Tensor gate, Tensor? up) -> Tensor[]", backward_shapes)
def _backward(grad: Tensor, gate: Tensor, up: Tensor | None) -> list[Tensor]:
    made = backward_shapes(grad, gate, up)
    gate_RD, up_RD = _rows(gate, up)
    into_gate_RD, into_up_RD = _rows(made[0], None if up is None else made[1])
    if grad.numel():
        grad_RD = _with_rows(grad.reshape(-1, grad.shape[-1]))
        grid, block = _grid(gate_RD)
        source: Any = import_module(_SOURCE)
        source.backward[grid](
            grad_RD,
            gate_RD,
            up_RD,
            into_gate_RD,
            into_up_RD,
            grad_RD.stride(0),
            gate_RD.stride(0),
            up_RD.stride(0),
            into_gate_RD.stride(0),
            gate_RD.shape[1],
            BLOCK=block,
            num_warps=_num_warps(block),
        )
    return made


def _rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as rows, of the one tensor or the two."""
    rows = [_with_rows(t.reshape(math.prod(t.shape[:-1]), t.shape[-1])) for t in (gate, up) if t is not None]
    if len(rows) == 1:
        gate_RD, up_RD = rows[0].chunk(2, dim=-1)
        return gate_RD, up_RD
    return rows[0], rows[1]


def _with_rows(t_RD: Tensor) -> Tensor:
    """Rows may lie at any distance; their numbers must be neighbours."""
    return t_RD if t_RD.stride(-1) == 1 else t_RD.contiguous()


def _grid(gate_RD: Tensor) -> tuple[tuple[int, int], int]:
    num_rows, width = gate_RD.shape
    block = min(_BLOCK, 1 << (width - 1).bit_length())
    return (num_rows, math.ceil(width / block)), block


def _num_warps(block: int) -> int:
    return max(1, min(8, block // 512))


def refusal(gate: Tensor, up: Tensor | None = None) -> str | None:
    """GPUs, at most 32 bits a number, one dtype."""
    if up is not None and up.dtype != gate.dtype:
        return f"up is {up.dtype}, gate {gate.dtype}"
    return no_triton(gate, up)


KERNEL = Kernel(
    id="swiglu.triton",
    op="swiglu",
    title="One Triton kernel each way",
    module=__name__,
    run=partial(gated, Way(_forward, _backward)),
    refusal=refusal,
    order=100,
)
