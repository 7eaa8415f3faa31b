"""The C kernel for few-bit products on a CPU: compiled once for this machine, called on torch's own threads.

The weights' layout is described in kernel.c. Nothing is compiled before the first layer asks for it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from flatout.core.errors import NativeError
from flatout.core.runtime.c_compiler import STRICT_FLAGS, native_flags
from flatout.core.runtime.compiled_source import load_source

SOURCE: Final = Path(__file__).with_name("kernel.c")
LANES: Final = 16
MOST_INPUTS: Final = 60_000
"""Sums of 255 * 127 for each input stay below 2**31."""


class FewBitsWeights(ctypes.Structure):
    """What the calls of a layer share: `weights` of kernel.c. It points into tensors that the owner keeps."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w", "scales", "bias")),
        *((name, ctypes.c_long) for name in ("k", "n", "group", "terms")),
        *((name, ctypes.c_float) for name in ("step", "zero")),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The kernel of this machine, compiled into the user's cache folder once. Raises NativeError where there can be none."""
    found = load_source(SOURCE, flags=_flags())
    pointer, whole = ctypes.c_void_p, ctypes.c_long
    found.flatout_product.argtypes = [pointer, pointer, whole, pointer, ctypes.c_int]
    found.flatout_recurrent.argtypes = [*[pointer] * 3, whole, whole, *[pointer] * 5, ctypes.c_int, ctypes.c_int]
    return found


def refusal() -> str | None:
    """Why this machine has no kernel; None when it has one."""
    try:
        library()
    except NativeError as e:
        return str(e)
    return None


def packed8(whole: Tensor) -> Tensor:
    """Weights [n, k] of whole numbers in -128..127 as kernel.c wants them: uint8 [blocks, quads, 16, 4].

    >>> packed8(torch.tensor([[1, -1]], dtype=torch.int8))[0, 0, 0].tolist()
    [129, 127, 128, 128]
    """
    n, k = whole.shape
    padded = torch.full((-(-n // LANES) * LANES, -(-k // 4) * 4), 128, dtype=torch.uint8)
    padded[:n, :k] = (whole.cpu().to(torch.int16) + 128).to(torch.uint8)
    return padded.view(-1, LANES, padded.shape[1] // 4, 4).transpose(1, 2).contiguous()


def packed4(whole: Tensor, *, group: int) -> Tensor:
    """Weights [n, k] of whole numbers in -8..7: uint8 [blocks, quads / 2, 16, 4], a low and a high number a byte.

    `group` is a multiple of 8; inputs are filled up to whole groups.

    >>> packed4(torch.tensor([[1, 2, 3, 4, -8, 0, 0, 0]], dtype=torch.int8), group=8)[0, 0, 0].tolist()
    [9, 138, 139, 140]
    """
    n, k = whole.shape
    padded = torch.full((-(-n // LANES) * LANES, -(-k // group) * group), 8, dtype=torch.uint8)
    padded[:n, :k] = (whole.cpu() + 8).to(torch.uint8)
    quads = padded.view(-1, LANES, padded.shape[1] // 8, 2, 4).permute(3, 0, 2, 1, 4)
    return (quads[0] | (quads[1] << 4)).contiguous()


def padded_outputs(values: Tensor) -> Tensor:
    """Float32 numbers of outputs [n, ...] filled up with 0 to whole blocks of 16 outputs: [blocks, ..., 16], outputs last."""
    n = values.shape[0]
    whole = torch.zeros(-(-n // LANES) * LANES, *values.shape[1:])
    whole[:n] = values.detach().float().cpu()
    return whole.view(-1, LANES, *values.shape[1:]).movedim(1, -1).contiguous()


def few_bits_product(weights: int, x: Tensor, *, num_outputs: int) -> Tensor:
    """Rows [..., k] times the Weights at an address, plus bias: [..., num_outputs]. `x` is float32, contiguous, on the CPU."""
    y = x.new_empty((*x.shape[:-1], num_outputs))
    rows = math.prod(x.shape[:-1])
    if rows and not library().flatout_product(weights, x.data_ptr(), rows, y.data_ptr(), torch.get_num_threads()):
        raise MemoryError(f"no memory for {rows} rows of activations in 8 bits")
    return y


def few_bits_recurrent(
    addresses: tuple[int, int],
    x: Tensor,
    before: tuple[Tensor, Tensor | None],
    *,
    num_state: int,
    backwards: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All steps of a layer: `x` [T, B, k] and the state h and c [B, num_state] give outputs [T, B, num_state] and the last state.

    `addresses` are of the inputs' Weights and the state's. c None: a GRU. All are float32, contiguous, on the CPU.
    """
    h, c = before
    steps, batch = x.shape[:2]
    y, last_h = x.new_empty((steps, batch, num_state)), torch.empty_like(h)
    last_c, at_c, at_last = None, None, None
    if c is not None:
        last_c = torch.empty_like(c)
        at_c, at_last = c.data_ptr(), last_c.data_ptr()
    found = library().flatout_recurrent(
        *(*addresses, x.data_ptr(), steps, batch, h.data_ptr(), at_c),
        *(y.data_ptr(), last_h.data_ptr(), at_last, backwards, torch.get_num_threads()),
    )
    if not found:
        raise MemoryError(f"no memory for {steps} steps of {batch} sequences")
    return y, last_h, last_c


def _flags() -> tuple[str, ...]:
    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    # -fopenmp only where it compiles: torch's OpenMP is taken at the link.
    return (*STRICT_FLAGS, "-fopenmp", *native_flags(), *wide)


def addresses(**values: Any) -> FewBitsWeights:
    """A layer's Weights; tensors are given by address, and the caller keeps them alive."""
    return FewBitsWeights(**{name: v.data_ptr() if isinstance(v, Tensor) else v for name, v in values.items()})
