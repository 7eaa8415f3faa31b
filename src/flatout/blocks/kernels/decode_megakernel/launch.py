"""The steps of a decode megakernel as records in the device's memory, and the launch that runs them all.

M rows, P programs, one to a processor
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.cached_attention.rope import HEADS
from flatout.blocks.kernels.decode_megakernel.steps import AttentionStep, ProductStep, Step, StepResult
from flatout.blocks.kernels.nvrtc import Function, compiled, has_early_launches, why_not
from flatout.blocks.kernels.quantised_linear.mma import (
    MOST_ROWS,
    STEPS,
    dense,
    most_shared_bytes,
    passes,
    processors,
    row_bytes,
)

_SOURCE: Final = Path(__file__).parent / "on_device" / "megakernel.cu"
_DIM: Final = 128
_WARPS: Final = 8
"""Of a program, which has a processor for itself."""
_EACH: Final = 4
"""Steps of a stage for each warp, which go side by side."""
_ABSENT: Final = -1
"""As megakernel.cu has it, in 32 bits."""
_MOST_PLACES: Final = 1 << 20
"""Up to which megakernel.cu divides places rightly."""
_AHEAD: Final = 4
"""Records that a program has at hand (megakernel.cu)."""
_LEAST_DEPTH: Final = 2
"""Stages with which a launch still makes sense."""
_MOST_DEPTH: Final = 16
_BEGUN: Final = {4: 1, 16: 2}
"""Stages on their way at a time, by bits: the fastest of 1, 2, 3 and 4 on an H200."""


class _Op(ctypes.Structure):
    """`Op` of megakernel.cu; what is not said is 0."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "scales", "norm", "bias", "residual")),
        *((name, ctypes.c_void_p) for name in ("y", "keys", "values", "parts")),
        *((name, ctypes.c_int) for name in ("is_attention", "N", "K", "is_gated", "heads", "groups", "shared", "places")),
        *((name, ctypes.c_int) for name in ("num_parts", "each", "more", "has_residual", "is_last")),
        *((name, ctypes.c_float) for name in ("eps", "scale", "per_heads", "per_shared", "per_part")),
        ("rest", ctypes.c_char * 8),
    ]  # fmt: skip


class MegakernelLaunch:
    """The steps' own buffers and records. A call is one launch."""

    def __init__(
        self, steps: Sequence[Step], rows: int, angles: tuple[Tensor, Tensor] | None, device: torch.device
    ) -> None:
        self._rows, self._angles, self._device = rows, angles, device
        self._programs = processors(device)
        self._memory, bits = _shared_memory(steps, rows, device), _bits(steps)
        self._function = _function(bits, passes(rows, bits), self._memory.depth, device)
        self._last = torch.empty((rows, steps[-1].width), dtype=torch.bfloat16, device=device)
        between = [_two_sets((rows, step.width // 2), device) for step in steps[:-1]]
        self._values = [*between, self._last]
        self._steps = list(steps)  # tensors whose addresses stand in the records
        self._parts = {i: _two_sets((_num_units(step, rows, self._programs), _DIM + 2), device)
                       for i, step in enumerate(steps) if isinstance(step, AttentionStep)}  # fmt: skip
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        records = b"".join(self._record(i) for i in range(len(steps)))
        self._records = torch.frombuffer(bytearray(records), dtype=torch.uint8).to(device)

    def takes(self, x: Tensor) -> bool:
        """Whether x is of the kind that this launch is for."""
        is_plain = not (torch.is_grad_enabled() and x.requires_grad)
        return x.device == self._device and x.dtype == torch.bfloat16 and is_plain

    def __call__(self, x: Tensor, position: Tensor | None) -> Tensor:
        x = dense(x)
        memory, angles = self._memory, (None, None) if self._angles is None else self._angles
        self._function(
            (self._programs, 1, 1), 32 * _WARPS + 32, memory.num_bytes, self._records, x, position, *angles, self._counters,
            len(self._steps), self._rows, memory.most_in, memory.most_sums, is_side_by_side=True,
        )  # fmt: skip
        return self._last

    def _record(self, i: int) -> bytes:
        step = self._steps[i]
        return bytes(self._of_attention(i, step) if isinstance(step, AttentionStep) else self._of_product(i, step))

    def _of_product(self, i: int, step: ProductStep) -> _Op:
        weight = step.weight
        each, more = divmod(weight.words.shape[0], self._programs)
        return _Op(
            x=self._address(step.x), codes=_at(weight.words), scales=_at(weight.scales), norm=_at(step.norm), bias=_at(step.bias),
            residual=self._address(step.residual), y=_at(self._values[i]), N=weight.outputs, K=weight.inputs,
            is_gated=weight.is_gated, each=each, more=more, has_residual=step.residual is not None,
            is_last=i == len(self._steps) - 1, eps=step.eps,
        )  # fmt: skip

    def _of_attention(self, i: int, step: AttentionStep) -> _Op:
        parts, shared = _parts_of(step, self._rows, self._programs), step.heads // step.groups
        each, more = divmod(_num_units(step, self._rows, self._programs), self._programs)
        return _Op(
            x=self._address(step.qkv), y=_at(self._values[i]), keys=_at(step.keys), values=_at(step.values),
            parts=_at(self._parts[i]), is_attention=True, heads=step.heads, groups=step.groups, shared=shared,
            places=step.keys.shape[2], num_parts=parts, each=each, more=more, scale=step.dim**-0.5,
            per_heads=1 / step.heads, per_shared=1 / shared, per_part=1 / parts,
        )  # fmt: skip

    def _address(self, value: StepResult | None) -> int | None:
        """None for the megakernel's input, whose address comes with each call."""
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
    if len({step.weight.bits for step in steps if isinstance(step, ProductStep)}) > 1:
        return "weights have different bits"
    if torch.is_grad_enabled() and x.requires_grad:
        return "gradients are recorded, and the kernel has none"
    if x.dtype != torch.bfloat16:
        return f"x is {x.dtype}, not bfloat16"
    odd = next((i for i, step in enumerate(steps[:-1], 1) if step.width % 2), None)
    if odd is not None:
        return f"step {odd}: an odd number of results; programs hand on two at a time"
    for i, step in enumerate(steps, 1):
        if isinstance(step, AttentionStep):
            why = _why_not_attention(step)
        elif any(t is not None and t.dtype != torch.bfloat16 for t in (step.bias, step.norm)):
            why = "bias and norm must be bfloat16"
        why = why or next((_why_unready(t, x.device) for t in _tensors(step) if _why_unready(t, x.device)), None)
        if why is not None:
            return f"step {i}: {why}"
    if angles is not None and any(t.dtype != torch.float32 or _why_unready(t, x.device) for t in angles):
        return "cosines and sines must be float32, row after row, on the device"
    has_room = _shared_memory(steps, rows, x.device).depth >= _LEAST_DEPTH
    return None if has_room else f"{rows} rows of these widths leave no shared memory for weights"


def _why_not_attention(step: AttentionStep) -> str | None:
    if step.dim != _DIM or step.keys.dtype != torch.bfloat16 or step.values.dtype != torch.bfloat16:
        return f"the kernel is for bfloat16 and heads of {_DIM}"
    if step.keys.shape[2] > _MOST_PLACES:
        return f"there are {step.keys.shape[2]} places; the kernel is for up to {_MOST_PLACES}"
    return None if step.qkv.number else "an attention of the megakernel's input; the kernel is for that of a product"


def _tensors(step: Step) -> list[Tensor]:
    if isinstance(step, AttentionStep):
        return [step.keys, step.values]
    return [t for t in (step.weight.words, step.weight.scales, step.bias, step.norm) if t is not None]


def _why_unready(t: Tensor, device: torch.device) -> str | None:
    if t.device != device:
        return f"a tensor is on {t.device}, x on {device}"
    is_ready = t.is_contiguous() and t.data_ptr() % 16 == 0
    return None if is_ready else "a tensor is not contiguous from a multiple of 16 bytes"


def _bits(steps: Sequence[Step]) -> int:
    return next(step.weight.bits for step in steps if isinstance(step, ProductStep))


def _parts_of(step: AttentionStep, rows: int, programs: int) -> int:
    """Parts of the places of a head, so that units are as many as programs."""
    return max(1, programs // (rows * step.heads))


def _num_units(step: AttentionStep, rows: int, programs: int) -> int:
    return rows * step.heads * _parts_of(step, rows, programs)


def _at(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _two_sets(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Words of a launch, and those of the next one."""
    return torch.full((2, *shape), _ABSENT, dtype=torch.int32, device=device)


class _SharedMemory(NamedTuple):
    """A program's, in the layout of megakernel.cu: the most inputs of a product, how many numbers the sums of all warps are,
    bytes in all, and the stages that there is room for."""

    most_in: int
    most_sums: int
    num_bytes: int
    depth: int


def _shared_memory(steps: Sequence[Step], rows: int, device: torch.device) -> _SharedMemory:
    bits, products = _bits(steps), [step for step in steps if isinstance(step, ProductStep)]
    most_in = max(step.weight.inputs for step in products)
    tiles = max(-(-step.weight.words.shape[0] // processors(device)) for step in products)
    x_bytes = rows * row_bytes(most_in, bits)
    attention = _WARPS * (_DIM + 2) - x_bytes // 4  # inputs and sums leave room for the sums of an attention
    most_sums = max(_WARPS * tiles * 16 * rows, -(-attention // 4) * 4)
    fixed_bytes = x_bytes + 4 * (most_sums + _DIM + 16 * _WARPS + 8) + _AHEAD * ctypes.sizeof(_Op)
    stage_bytes = _EACH * _WARPS * (1024 + (32 if bits == 4 else 0)) + 16  # the steps of each warp, and its two gates
    depth = min(_MOST_DEPTH, (most_shared_bytes(device) - fixed_bytes) // stage_bytes)
    return _SharedMemory(most_in, most_sums, fixed_bytes + depth * stage_bytes, depth)


@lru_cache(maxsize=64)
def _function(bits: int, num_passes: int, depth: int, device: torch.device) -> Function:
    return compiled(
        (*STEPS, HEADS, _SOURCE), "decode_megakernel", megakernel_constants(bits, num_passes, depth), device
    )


def megakernel_constants(bits: int, num_passes: int, depth: int) -> dict[str, int]:
    """The constants of the compiled kernel."""
    sizes = {"WARPS": _WARPS, "EACH": _EACH, "DEPTH": depth, "BEGUN": min(_BEGUN[bits], depth)}
    return {"BITS": bits, "PASSES": num_passes, **sizes}
