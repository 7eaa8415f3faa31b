"""A product with what comes before and behind it in a layer: `laid_linear`, as torch says it, and by one kernel.

M rows, N outputs, K inputs
"""

from __future__ import annotations

from functools import cache, lru_cache
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.nvrtc import Function, compiled, why_not
from flatout.kernels.opaque import composed, opaque
from flatout.kernels.quantised_linear.laying import ROWS, Laid, unlaid
from flatout.kernels.quantised_linear.packing import expanded

MOST_ROWS: Final = 8
"""The columns of one product of the matrix units."""
_MOST_SHARED_BYTES: Final = 80 * 1024
"""What two programs of a processor can have side by side on an A100, beside what they declare."""


class Cut(NamedTuple):
    """How a product is cut up: `warps` of a program, which share the inputs of its `tiles` of 16 outputs; `depth` KiB of
    each tile are on their way to a warp at a time."""

    warps: int
    tiles: int
    depth: int

    def __str__(self) -> str:
        return f"{self.warps} warps, {self.tiles} tiles, {self.depth} deep"


CUTS: Final = (Cut(8, 1, 4), Cut(4, 1, 4), Cut(16, 1, 2), Cut(8, 2, 2), Cut(4, 2, 4), Cut(8, 1, 2), Cut(4, 1, 8))
"""What is worth a measurement; the first is taken where nothing was measured."""
_ARGUMENTS: Final = (
    "(Tensor x, Tensor words, Tensor? scales, int outputs, int inputs, int bits, bool is_gated, Tensor? bias, "
    "Tensor? norm, float eps, Tensor? residual) -> Tensor"
)
_CHOSEN: dict[tuple[int, int, int], Cut] = {}


def keep(weight: Laid, cut: Cut) -> None:
    """From now on this cut is taken for weights of these sizes and bits, in this process."""
    _CHOSEN[weight.outputs, weight.inputs, weight.bits] = cut


def laid_linear(
    x: Tensor,
    weight: Laid,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + gated(F.linear(F.rms_norm(x, norm), weight)) + bias, each part where it is given: [..., N] of x [..., K].

    `gated`, for weights that were laid so: silu(first half of the outputs) * second half, [..., N / 2]. On a GPU of bfloat16 and
    up to 8 rows one kernel, which is launched before the launch before it has ended and reads the weight while it waits:
    that launch must not write the weight. Elsewhere the reference. No gradients. Raises UsageError for sizes that do not fit.

    >>> from flatout.kernels.quantised_linear.laying import lay
    >>> from flatout.kernels.quantised_linear.packing import pack
    >>> laid_linear(torch.ones(1, 128), lay(pack(torch.full((2, 128), 7.0), bits=4)), residual=torch.ones(1, 2))
    tensor([[897., 897.]])
    """
    width = weight.outputs // 2 if weight.is_gated else weight.outputs
    if x.dim() == 0 or x.shape[-1] != weight.inputs:
        raise UsageError(f"x {tuple(x.shape)} does not meet a weight of {weight.inputs} inputs")
    if residual is not None and residual.shape != (*x.shape[:-1], width):
        raise UsageError(f"residual {tuple(residual.shape)} is not {(*x.shape[:-1], width)}")
    if any(t is not None and t.shape != (n,) for t, n in ((norm, weight.inputs), (bias, width))):
        raise UsageError(f"norm must be of {weight.inputs} numbers, bias of {width}")
    if torch.compiler.is_compiling():
        made: Tensor = torch.ops.flatout.laid_linear(x, *weight, bias, norm, eps, residual)
        return made
    return _chosen(x, *weight, bias, norm, eps, residual)


@composed(f"laid_linear{_ARGUMENTS}")
def _chosen(
    x: Tensor, words: Tensor, scales: Tensor | None, outputs: int, inputs: int, bits: int, is_gated: bool,
    bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    weight = Laid(words, scales, outputs, inputs, bits, is_gated)
    if why_not_fast(x, weight, norm, bias, residual) is not None:
        return reference(x, weight, bias, norm=norm, eps=eps, residual=residual)
    made: Tensor = _on_device(x, *weight, bias, norm, eps, residual)
    return made


def reference(
    x: Tensor,
    weight: Laid,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor:
    """The specification, in x's dtype."""
    y = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
    plain = unlaid(weight)
    scales = plain.scales if plain.scales is None or x.dtype != torch.float64 else plain.scales.double()
    y = F.linear(y, expanded(plain.codes, scales, bits=plain.bits, dtype=x.dtype))
    if weight.is_gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if bias is not None:
        y = y + bias
    return y if residual is None else residual + y


def why_not_fast(x: Tensor, weight: Laid, *others: Tensor | None) -> str | None:
    """Why the reference runs and not the kernel; None when the kernel does."""
    why = why_not(x.device)
    if why is not None:
        return why
    if any(t is not None and (t.dtype != torch.bfloat16 or t.device != x.device) for t in (x, *others)):
        return "x, norm, bias and residual must all be bfloat16, on one device"
    rows = x.numel() // weight.inputs
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows; the kernel is for 1 to {MOST_ROWS}"
    if _shared_bytes(rows, weight.inputs) > _MOST_SHARED_BYTES:
        return f"{rows} rows of {weight.inputs} numbers do not fit shared memory"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        return "gradients are recorded, and the kernel has none"
    return None


def run_cut(
    cut: Cut, x: Tensor, weight: Laid, bias: Tensor | None = None, *,
    norm: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel's result by a cut that is named."""
    rows, width = x.numel() // weight.inputs, weight.outputs // 2 if weight.is_gated else weight.outputs
    x = _dense(x)
    norm, bias, residual = (t if t is None else _dense(t) for t in (norm, bias, residual))
    y = x.new_empty((*x.shape[:-1], width))
    tiles = weight.words.shape[0]
    function = _function(cut, weight.bits, norm is not None, weight.is_gated, x.device)
    scales = None if weight.scales is None else weight.scales.view(torch.int32)
    function(
        (-(-tiles // cut.tiles), 1, 1), 32 * cut.warps, _shared_bytes(rows, weight.inputs),
        x, weight.words, scales, norm, bias, residual, y, rows, weight.outputs, weight.inputs, float(eps),
    )  # fmt: skip
    return y


@opaque(
    f"laid_linear_on_device{_ARGUMENTS}",
    lambda x, words, scales, outputs, inputs, bits, is_gated, bias, norm, eps, residual: x.new_empty(
        (*x.shape[:-1], outputs // 2 if is_gated else outputs)
    ),
)
def _on_device(
    x: Tensor, words: Tensor, scales: Tensor | None, outputs: int, inputs: int, bits: int, is_gated: bool,
    bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    weight = Laid(words, scales, outputs, inputs, bits, is_gated)
    cut = _CHOSEN.get((outputs, inputs, bits), CUTS[0])
    return run_cut(cut, x, weight, bias, norm=norm, eps=eps, residual=residual)


def _dense(t: Tensor) -> Tensor:
    """Beginning at a multiple of 16 bytes, as the kernel reads."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


def _shared_bytes(rows: int, inputs: int) -> int:
    """A row is 16 bytes longer, so that rows begin in other banks."""
    return rows * (2 * inputs + ROWS)


@lru_cache(maxsize=512)
def _function(cut: Cut, bits: int, has_norm: bool, is_gated: bool, device: torch.device) -> Function:
    return compiled(source("fragments.cu"), "laid_linear", constants(cut, bits, has_norm, is_gated), device)


def constants(cut: Cut, bits: int, has_norm: bool, is_gated: bool) -> dict[str, int]:
    """Of the compiled kernel."""
    sizes = {"WARPS": cut.warps, "TILES": cut.tiles, "DEPTH": cut.depth}
    return {"BITS": bits, "NORM": int(has_norm), "GATED": int(is_gated), **sizes}


@cache
def source(name: str) -> str:
    """Of a kernel in this folder, with the device's instructions before it."""
    return instructions() + (Path(__file__).parent / "on_device" / name).read_text(encoding="utf-8")


@cache
def instructions() -> str:
    """The device's instructions as functions, for kernels in CUDA C of other folders too."""
    return (Path(__file__).parent / "on_device" / "words.cu").read_text(encoding="utf-8")
