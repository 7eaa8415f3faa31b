"""A chain's steps as records in the device's memory, and the launch that runs them all.

M rows, P programs, one to a processor
"""

from __future__ import annotations

import ctypes
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
_ABSENT: Final = -1
"""As chain.cu has it, in 32 bits."""
_MOST_PLACES: Final = 1 << 20
"""Up to which chain.cu divides places rightly."""
_AHEAD: Final = 4
"""Records that a program has at hand (chain.cu)."""
_LEAST_DEPTH: Final = 2
"""Stages with which a launch still makes sense."""
_MOST_DEPTH: Final = 16
_BEGUN: Final = {4: 1, 16: 2}
"""Stages on their way at a time, by bits: the fastest of 1, 2, 3 and 4 on an H200."""


class _Op(ctypes.Structure):
    """`Op` of chain.cu; what is not said is 0."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "norm", "bias", "residual")),
        *((name, ctypes.c_void_p) for name in ("y", "keys", "values", "parts")),
        *((name, ctypes.c_int) for name in ("is_attention", "N", "K", "is_gated", "heads", "groups", "shared", "places")),
        *((name, ctypes.c_int) for name in ("num_parts", "each", "more", "has_residual", "is_last")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "per_heads", "per_shared", "per_part")),
        ("rest", ctypes.c_char * 8),
    ]  # fmt: skip


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
        self._last = torch.empty((rows, steps[-1].width), dtype=torch.bfloat16, device=device)
        between = [_two_sets((rows, step.width // 2), device) for step in steps[:-1]]
        self._values = [*between, self._last]
        self._kept = list(steps)  # tensors whose addresses stand in the records
        self._parts = {i: _two_sets((_num_units(step, rows, self._programs), _DIM + 2), device)
                       for i, step in enumerate(steps) if isinstance(step, Attention)}  # fmt: skip
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
            (self._programs, 1, 1), 32 * _WARPS + 32, self._shared, self._records, x, position, cosines, sines, self._counters,
            len(self._kept), self._rows, *self._sizes, is_side_by_side=True,
        )  # fmt: skip
        return self._last

    def _record(self, i: int) -> bytes:
        step = self._kept[i]
        return bytes(self._of_attention(i, step) if isinstance(step, Attention) else self._of_product(i, step))

    def _of_product(self, i: int, step: Product) -> _Op:
        weight = step.weight
        each, more = divmod(weight.words.shape[0], self._programs)
        return _Op(
            x=self._address(step.x), codes=_at(weight.words), scales=_at(weight.scales), norm=_at(step.norm), bias=_at(step.bias),
            residual=self._address(step.residual), y=_at(self._values[i]), N=weight.outputs, K=weight.inputs,
            is_gated=weight.is_gated, each=each, more=more, has_residual=step.residual is not None,
            is_last=i == len(self._kept) - 1, eps=step.eps,
        )  # fmt: skip

    def _of_attention(self, i: int, step: Attention) -> _Op:
        parts, shared = _parts_of(step, self._rows, self._programs), step.heads // step.groups
        each, more = divmod(_num_units(step, self._rows, self._programs), self._programs)
        return _Op(
            x=self._address(step.qkv), y=_at(self._values[i]), keys=_at(step.keys), values=_at(step.values),
            parts=_at(self._parts[i]), is_attention=True, heads=step.heads, groups=step.groups, shared=shared,
            places=step.keys.shape[2], num_parts=parts, each=each, more=more, scale=step.dim**-0.5,
            per_heads=1 / step.heads, per_shared=1 / shared, per_part=1 / parts,
        )  # fmt: skip

    def _address(self, value: Value | None) -> int | None:
        """None for what the chain is given, whose address comes with each call."""
        return _at(self._values[value.number - 1]) if value is not None and value.number else None


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
    if step.keys.shape[2] > _MOST_PLACES:
        return f"there are {step.keys.shape[2]} places; the kernel is for up to {_MOST_PLACES}"
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


def _num_units(step: Attention, rows: int, programs: int) -> int:
    return rows * step.heads * _parts_of(step, rows, programs)


def _at(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _two_sets(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Words of a launch, and those of the next one."""
    return torch.full((2, *shape), _ABSENT, dtype=torch.int32, device=device)


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
    return of_x + 4 * (most_sums + _DIM + 16 * _WARPS + 8) + _AHEAD * ctypes.sizeof(_Op)


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
