"""A chain's steps as records in the device's memory, and the launch that runs them all.

M rows, P programs, one to a processor
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flatout.kernels.cached_attention.turned import instructions_of_heads
from flatout.kernels.chain.steps import Attention, Product, Step, Value
from flatout.kernels.nvrtc import Function, compiled, has_early_launches, why_not
from flatout.kernels.quantised_linear.laid import (
    MOST_ROWS,
    dense,
    instructions_of_steps,
    most_shared_bytes,
    passes,
    processors,
    row_bytes,
)

_DIM: Final = 128
_WARPS: Final = 8
"""Of a program, which has a processor for itself."""
_EACH: Final = 4
"""Steps of a stage for each warp, which go side by side."""
_RECORD: Final = struct.Struct("<9Q8i2f4i")
"""`Op` of chain.cu."""
_AHEAD: Final = 4
"""Records that a program has at hand (chain.cu)."""
_LEAST_DEPTH: Final = 2
"""Stages with which a launch still makes sense."""
_MOST_DEPTH: Final = 16
_BEGUN: Final = {4: 1, 16: 2}
"""Stages on their way at a time, by bits: the fastest of 1, 2, 3 and 4 on an H200."""


class Launched:
    """The steps' own buffers and records. A call is one launch."""

    def __init__(
        self, steps: Sequence[Step], rows: int, angles: tuple[Tensor, Tensor] | None, device: torch.device
    ) -> None:
        self._rows, self._angles, self._device = rows, angles, device
        self._programs = processors(device)
        self._sizes, depth = _sizes(steps, rows, self._programs), _depth(steps, rows, self._programs, device)
        self._shared = _fixed_bytes(steps, rows, self._programs) + depth * _stage_bytes(steps)
        self._function = _function(_bits(steps), passes(rows, _bits(steps)), depth, device)
        # What is had at last are numbers; in between they lie in pairs with a stamp.
        self._last = torch.empty((rows, steps[-1].width), dtype=torch.bfloat16, device=device)
        between = [torch.zeros((rows, step.width), dtype=torch.int32, device=device) for step in steps[:-1]]
        self._values = [*between, self._last]
        self._kept = list(steps)  # tensors whose addresses stand in the records
        self._parts = torch.zeros(_num_parts(steps, rows, self._programs), dtype=torch.int64, device=device)
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        records = b"".join(self._record(i) for i in range(len(steps)))
        self._records = torch.frombuffer(bytearray(records), dtype=torch.uint8).to(device)

    def takes(self, x: Tensor) -> bool:
        """Whether x is of the kind for which this was made."""
        is_plain = not (torch.is_grad_enabled() and x.requires_grad)
        return x.device == self._device and x.dtype == torch.bfloat16 and is_plain

    def __call__(self, x: Tensor, position: Tensor | None) -> Tensor:
        x = dense(x)
        cosines, sines = (None, None) if self._angles is None else self._angles
        self._function(
            (self._programs, 1, 1), 32 * _WARPS + 32, self._shared, self._records, x, position, cosines, sines, self._parts,
            self._counters, len(self._kept), self._rows, *self._sizes, is_side_by_side=True,
        )  # fmt: skip
        return self._last

    def _record(self, i: int) -> bytes:
        step, y = self._kept[i], self._values[i].data_ptr()
        if isinstance(step, Attention):
            parts = _parts_of(step, self._rows, self._programs)
            x, scale, shared = self._address(step.qkv), step.dim**-0.5, step.heads // step.groups
            pointers = (x, 0, 0, 0, 0, 0, y, step.keys.data_ptr(), step.values.data_ptr())
            of_heads = (1, 0, 0, 0, step.heads, shared, step.keys.shape[2], parts)
            return _RECORD.pack(*pointers, *of_heads, 0, scale, step.qkv.number, 0, 0, 0)
        weight = step.weight
        given = (weight.words, weight.scales, step.norm, step.bias)
        addresses = [0 if t is None else t.data_ptr() for t in given]
        residual = 0 if step.residual is None else self._address(step.residual)
        sizes = (0, weight.outputs, weight.inputs, int(weight.is_gated), 0, 0, 0, 0)
        residual_from = -1 if step.residual is None else step.residual.number
        is_last = i == len(self._kept) - 1
        numbers = (step.x.number, residual_from, int(is_last), 0)
        return _RECORD.pack(self._address(step.x), *addresses, residual, y, 0, 0, *sizes, step.eps, 0, *numbers)

    def _address(self, value: Value) -> int:
        """0 for what the chain is given, whose address comes with each call."""
        return self._values[value.number - 1].data_ptr() if value.number else 0


def why_not_one(steps: Sequence[Step], rows: int, angles: tuple[Tensor, Tensor] | None, x: Tensor) -> str | None:
    """Why these steps are not one launch; None when they are."""
    why = why_not(x.device)
    if why is not None:
        return why
    if not has_early_launches(x.device):
        return "the device is older than Hopper and has no bulk copies"
    if rows > MOST_ROWS:
        return f"there are {rows} rows; the kernel is for 1 to {MOST_ROWS}"
    if len({step.weight.bits for step in steps if isinstance(step, Product)}) > 1:
        return "weights have different bits"
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are recorded, and the kernel has none"
    if x.dtype != torch.bfloat16:
        return f"x is {x.dtype}, not bfloat16"
    odd = next((i for i, step in enumerate(steps[:-1], 1) if step.width % 2), None)
    if odd is not None:
        return f"step {odd}: an odd number of results; programs hand on two at a time"
    for i, step in enumerate(steps, 1):
        why = _why_not_attention(step) if isinstance(step, Attention) else _why_not_product(step)
        why = why or next((_why_unready(t, x.device) for t in _tensors(step) if _why_unready(t, x.device)), None)
        if why is not None:
            return f"step {i}: {why}"
    if angles is not None and any(t.dtype != torch.float32 or _why_unready(t, x.device) for t in angles):
        return "cosines and sines must be float32, row after row, on the device"
    depth = _depth(steps, rows, processors(x.device), x.device)
    return None if depth >= _LEAST_DEPTH else f"{rows} rows of these widths leave no shared memory for weights"


def _why_not_product(step: Product) -> str | None:
    if any(t is not None and t.dtype != torch.bfloat16 for t in (step.bias, step.norm)):
        return "bias and norm must be bfloat16"
    return None


def _why_not_attention(step: Attention) -> str | None:
    if step.dim != _DIM or step.keys.dtype != torch.bfloat16 or step.values.dtype != torch.bfloat16:
        return f"the kernel is for bfloat16 and heads of {_DIM}"
    return None if step.qkv.number else "an attention of what the chain is given; the kernel is for that of a product"


def _tensors(step: Step) -> list[Tensor]:
    if isinstance(step, Attention):
        return [step.keys, step.values]
    return [t for t in (step.weight.words, step.weight.scales, step.bias, step.norm) if t is not None]


def _why_unready(t: Tensor, device: torch.device) -> str | None:
    if t.device != device:
        return f"a tensor is on {t.device}, x on {device}"
    return (
        None
        if t.is_contiguous() and t.data_ptr() % 16 == 0
        else "a tensor is not contiguous from a multiple of 16 bytes"
    )


def _bits(steps: Sequence[Step]) -> int:
    return next(step.weight.bits for step in steps if isinstance(step, Product))


def _parts_of(step: Attention, rows: int, programs: int) -> int:
    """Of the places of a head: so that units are as many as programs."""
    return max(1, programs // (rows * step.heads))


def _num_parts(steps: Sequence[Step], rows: int, programs: int) -> int:
    """Pairs of the largest attention's parts: a head and two of its softmax each."""
    units = [rows * s.heads * _parts_of(s, rows, programs) for s in steps if isinstance(s, Attention)]
    return max(units, default=0) * (_DIM + 2) or 1


def _sizes(steps: Sequence[Step], rows: int, programs: int) -> tuple[int, int]:
    """The most inputs of a product, and how many numbers the sums of all warps are; these and the inputs leave room for the sums
    of an attention."""
    products = [step for step in steps if isinstance(step, Product)]
    most_in = max(step.weight.inputs for step in products)
    tiles = max(-(-step.weight.words.shape[0] // programs) for step in products)
    attention = _WARPS * (_DIM + 2) - rows * row_bytes(most_in, _bits(steps)) // 4
    return most_in, max(_WARPS * tiles * 16 * rows, -(-attention // 4) * 4)


def _fixed_bytes(steps: Sequence[Step], rows: int, programs: int) -> int:
    """Of shared memory, besides stages: as chain.cu lays it out."""
    most_in, most_sums = _sizes(steps, rows, programs)
    of_x = rows * row_bytes(most_in, _bits(steps))
    return of_x + 4 * (most_sums + _DIM + 16 * _WARPS + 8) + _AHEAD * _RECORD.size


def _stage_bytes(steps: Sequence[Step]) -> int:
    """The steps of each warp, and its two gates."""
    return _EACH * _WARPS * (1024 + (32 if _bits(steps) == 4 else 0)) + 16


def _depth(steps: Sequence[Step], rows: int, programs: int, device: torch.device) -> int:
    """Stages that there is room for."""
    room = most_shared_bytes(device) - _fixed_bytes(steps, rows, programs)
    return min(_MOST_DEPTH, room // _stage_bytes(steps))


@lru_cache(maxsize=64)
def _function(bits: int, num_passes: int, depth: int, device: torch.device) -> Function:
    return compiled(_source(), "chain", constants(bits, num_passes, depth), device)


def constants(bits: int, num_passes: int, depth: int) -> dict[str, int]:
    """Of the compiled kernel."""
    sizes = {"WARPS": _WARPS, "EACH": _EACH, "DEPTH": depth, "BEGUN": min(_BEGUN[bits], depth)}
    return {"BITS": bits, "PASSES": num_passes, **sizes}


@cache
def _source() -> str:
    own = (Path(__file__).parent / "on_device" / "chain.cu").read_text(encoding="utf-8")
    return instructions_of_steps() + instructions_of_heads() + own
