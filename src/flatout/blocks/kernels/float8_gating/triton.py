"""Products of the units for float8; SwiGLU and its gradients rounded where they are computed, by two Triton kernels a pass.

Left to Inductor, torchao's layers computed SwiGLU's gradients once for their largest magnitudes and once more to round them, in
2.6 and 2.8 times what their inputs' bytes take (bench/results/2026-11-29-h200, account_llama-float8_peer.json).

N rows, I inputs and outputs of the MLP, H hidden width
"""

from __future__ import annotations

import math
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.float8_formats import FORWARD, LARGEST, LARGEST_GRADIENT, Rounded
from flatout.blocks.kernels.float8_gating.reference import (
    Float8GatingPasses,
    gated_mlp,
    gradient_shapes,
    rounded_shapes,
    twice_rounded_shapes,
)
from flatout.blocks.kernels.opaque import opaque
from flatout.blocks.kernels.selection import no_triton
from flatout.blocks.training.float8 import MULTIPLE, refusal
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.float8_gating.on_device.tiles"
_BLOCK: Final = 4096
"""Numbers of a program: 16 a thread with 8 warps."""
_STRETCH: Final = 8
"""Blocks in which a program looks for the largest magnitude."""
HALVES: Final = (torch.bfloat16, torch.float16)
"""What products in float8 leave the units in."""
_ROWS: Final = 128
_COLUMNS: Final = 64
_NUM_WARPS: Final = 4
"""The tile that a program rounds and exchanges, and its warps: whole lines of 128 bytes are read, and written exchanged."""


def _refusal(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> str | None:
    why = no_triton(x, gate, up, down)
    if why is not None:
        return why
    sizes = (math.prod(x.shape[:-1]), *gate.shape)
    odd = [size for size in sizes if size % MULTIPLE]
    if odd:
        return f"a size of {odd[0]} is no multiple of {MULTIPLE}, as float8 products want"
    if x.dtype not in HALVES:
        return f"x is {x.dtype}; products in float8 leave the units in 16 bits"
    return refusal(x.device)


def _product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    """A result of the forward is summed in fewer bits by the units (fast accumulation), a gradient is not, as in torchao."""
    is_forward = a.values.dtype == b.values.dtype == FORWARD
    return torch._scaled_mm(a.values, b.values.t(), a.scale, b.scale, out_dtype=dtype, use_fast_accum=is_forward)


@opaque("float8_gating_triton_rounded(Tensor grad, Tensor scale) -> Tensor[]", twice_rounded_shapes)
def _rounded(grad: Tensor, scale: Tensor) -> list[Tensor]:
    small, exchanged = twice_rounded_shapes(grad, scale)
    _kernels().rounded_twice[_grid(grad)](
        *(grad.contiguous(), scale, small, exchanged.view(torch.int32)), *grad.shape, **_tile(grad)
    )
    return [small, exchanged]


@opaque("float8_gating_triton(Tensor gate, Tensor up) -> Tensor[]", rounded_shapes)
def _forward(gate: Tensor, up: Tensor) -> list[Tensor]:
    values, scale = rounded_shapes(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    source, total = _kernels(), gate.numel()
    largest = torch.zeros(1, dtype=torch.int32, device=gate.device)
    num_programs = math.ceil(total / (_BLOCK * _STRETCH))
    source.largest_gated[(num_programs,)](gate, up, largest, total, STRETCH=_STRETCH, BLOCK=_BLOCK, num_warps=8)
    source.rounded_gated[(math.ceil(total / _BLOCK),)](
        gate, up, largest, values, scale, total, LARGEST, BLOCK=_BLOCK, num_warps=8
    )
    return [values, scale]


@opaque("float8_gating_triton_backward(Tensor grad, Tensor gate, Tensor up, Tensor scale) -> Tensor[]", gradient_shapes)
def _backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> list[Tensor]:
    results = gradient_shapes(grad, gate, up, scale)
    to_gate_NH, to_gate_HN, to_up_NH, to_up_HN, gated_HN, gate_scale, up_scale = results
    words = [t.view(torch.int32) for t in (to_gate_HN, to_up_HN, gated_HN)]
    inputs = [t.contiguous() for t in (grad, gate, up)]
    source = _kernels()
    largest = torch.zeros(2, dtype=torch.int32, device=gate.device)
    total = gate.numel()
    num_programs = math.ceil(total / (_BLOCK * _STRETCH))
    source.largest_gradients[(num_programs,)](*inputs, largest, total, STRETCH=_STRETCH, BLOCK=_BLOCK, num_warps=8)
    source.rounded_gradients[_grid(gate)](
        *(*inputs, largest, scale, to_gate_NH, words[0], to_up_NH, words[1], words[2], gate_scale, up_scale),
        *(*gate.shape, LARGEST_GRADIENT),
        **_tile(gate),
    )
    return results


def _grid(matrix: Tensor) -> tuple[int, int]:
    num_rows, width = matrix.shape
    return math.ceil(num_rows / _ROWS), math.ceil(width / _COLUMNS)


def _tile(matrix: Tensor) -> dict[str, Any]:
    """Of a program that exchanges a tile. On a CPU it is interpreted: nothing else runs there."""
    num_rows, width = matrix.shape
    is_cut = bool(num_rows % _ROWS or width % _COLUMNS)
    sizes = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "num_warps": _NUM_WARPS}
    return {"MASKED": is_cut, "INTERPRETED": matrix.device.type == "cpu", **sizes}


def _kernels() -> Any:
    return import_module(_SOURCE)


KERNEL = kernel(
    __name__,
    "Products of the units, SwiGLU and its gradients rounded where they are computed",
    partial(gated_mlp, Float8GatingPasses(_product, _rounded, _forward, _backward)),
    order=100,
    refusal=_refusal,
    guarantee="quality",
)
