"""A product with what comes before and behind it in a layer: `packed_linear` in torch's operators, and by one kernel; and the
fastest cut of it, by measurement.

M rows, N outputs, K inputs
"""

from __future__ import annotations

from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.blocks.kernels.graph_timing import captured_calls, graph_times, num_copies, relative_error
from flatout.blocks.kernels.nvrtc import Function, compiled, why_not
from flatout.blocks.kernels.opaque import Side, composed, opaque
from flatout.blocks.kernels.quantised_linear.mma_packing import ROWS, MmaPackedWeight, unpack_from_mma
from flatout.blocks.kernels.quantised_linear.packing import expanded
from flatout.core.errors import UsageError

_FOLDER: Final = Path(__file__).parent / "on_device"
WORDS: Final = _FOLDER / "words.cu"
"""The device's instructions as functions, for kernels in CUDA C of other folders too."""
STEPS: Final = (WORDS, _FOLDER / "steps.cu")
"""And what a kernel in CUDA C does with packed weights."""
MOST_ROWS: Final = 8
"""The columns of one product of the matrix units."""
_MOST_SUMS_BYTES: Final = 24 * 1024
_DECLARED_BYTES: Final = 2 * 1024
"""At most, of shared memory that the kernel declares for itself and the system keeps."""


class MmaCut(NamedTuple):
    """How a product is cut up: `programs` to a processor share the tiles of 16 outputs; the `warps` of a program share the
    inputs, and each has `depth` KiB on their way at a time."""

    warps: int
    depth: int
    programs: int

    def __str__(self) -> str:
        return f"{self.warps} warps, {self.depth} deep, {self.programs} a processor"


CUTS: Final = (
    MmaCut(16, 5, 1),
    MmaCut(16, 6, 1),
    MmaCut(16, 4, 1),
    MmaCut(8, 10, 1),
    MmaCut(8, 5, 2),
    MmaCut(8, 3, 2),
    MmaCut(8, 2, 1),
)
"""What is worth a measurement; where nothing was measured the first is taken that fits the processor's shared memory."""
_ARGUMENTS: Final = (
    "(Tensor x, Tensor words, Tensor? scales, int outputs, int inputs, int bits, bool is_gated, Tensor? bias, "
    "Tensor? norm, float eps, Tensor? residual) -> Tensor"
)
_SELECTED: dict[tuple[int, int, int], MmaCut] = {}


def use_cut(weight: MmaPackedWeight, cut: MmaCut) -> None:
    """Take this cut for weights of these sizes and bits from now on, in this process."""
    _SELECTED[weight.outputs, weight.inputs, weight.bits] = cut


def packed_linear(
    x: Tensor,
    weight: MmaPackedWeight,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute residual + gated(F.linear(F.rms_norm(x, norm), weight)) + bias: [..., N] of x [..., K]; parts left out are skipped.

    `gated`, for weights packed so: silu(first half of the outputs) * second half, [..., N / 2]. On a GPU of bfloat16 and
    up to 8 rows one kernel, which is launched before the launch before it has ended and reads the weight while it waits:
    that launch must not write the weight. With 4 bits, numbers 2^22 times smaller than the largest of their row lose bits, and a
    row with one that is not finite gives NaN. Elsewhere the reference. No gradients. Raises UsageError for sizes that do not fit.

    >>> from flatout.blocks.kernels.quantised_linear.mma_packing import pack_for_mma
    >>> from flatout.blocks.kernels.quantised_linear.packing import pack_weight
    >>> packed_linear(torch.ones(1, 128), pack_for_mma(pack_weight(torch.full((2, 128), 7.0), bits=4)), residual=torch.ones(1, 2))
    tensor([[897., 897.]])
    """
    width = weight.outputs // 2 if weight.is_gated else weight.outputs
    if x.dim() == 0 or x.shape[-1] != weight.inputs:
        raise UsageError(f"x {tuple(x.shape)} does not meet a weight of {weight.inputs} inputs")
    if residual is not None and residual.shape != (*x.shape[:-1], width):
        raise UsageError(f"residual {tuple(residual.shape)} is not {(*x.shape[:-1], width)}")
    if any(t is not None and t.shape != (n,) for t, n in ((norm, weight.inputs), (bias, width))):
        raise UsageError(f"norm must be of {weight.inputs} numbers, bias of {width}")
    return _dispatched(x, *weight, bias, norm, eps, residual)


@composed(f"packed_linear{_ARGUMENTS}")
def _dispatched(
    x: Tensor, words: Tensor, scales: Tensor | None, outputs: int, inputs: int, bits: int, is_gated: bool,
    bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    weight = MmaPackedWeight(words, scales, outputs, inputs, bits, is_gated)
    if why_no_mma_kernel(x, weight, norm, bias, residual) is not None:
        return reference_packed_linear(x, weight, bias, norm=norm, eps=eps, residual=residual)
    y: Tensor = _on_device(x, *weight, bias, norm, eps, residual)
    return y


def reference_packed_linear(
    x: Tensor,
    weight: MmaPackedWeight,
    bias: Side = None,
    *,
    norm: Side = None,
    eps: float = 1e-5,
    residual: Side = None,
) -> Tensor:
    """The specification, in x's dtype."""
    y = x if norm is None else F.rms_norm(x, norm.shape, norm, eps)
    plain = unpack_from_mma(weight)
    scales = plain.scales if plain.scales is None or x.dtype != torch.float64 else plain.scales.double()
    y = F.linear(y, expanded(plain.codes, scales, bits=plain.bits, dtype=x.dtype))
    if weight.is_gated:
        gate, up = y.chunk(2, -1)
        y = F.silu(gate) * up
    if bias is not None:
        y = y + bias
    return y if residual is None else residual + y


def why_no_mma_kernel(x: Tensor, weight: MmaPackedWeight, *others: Tensor | None) -> str | None:
    """Why the reference runs and not the kernel; None when the kernel does."""
    why = why_not(x.device)
    if why is not None:
        return why
    if any(t is not None and (t.dtype != torch.bfloat16 or t.device != x.device) for t in (x, *others)):
        return "x, norm, bias and residual must all be bfloat16, on one device"
    rows = x.numel() // weight.inputs
    if not 1 <= rows <= MOST_ROWS:
        return f"there are {rows} rows; the kernel is for 1 to {MOST_ROWS}"
    if not fitting_cuts(1, weight, x.device):
        return f"a row of {weight.inputs} numbers does not fit shared memory"
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *others)):
        return "gradients are recorded, and the kernel has none"
    return None


def run_cut(
    cut: MmaCut, x: Tensor, weight: MmaPackedWeight, bias: Tensor | None = None, *,
    norm: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The kernel's result by a cut that is named."""
    rows, width = x.numel() // weight.inputs, weight.outputs // 2 if weight.is_gated else weight.outputs
    x = dense(x)
    norm, bias, residual = (t if t is None else dense(t) for t in (norm, bias, residual))
    y = x.new_empty((*x.shape[:-1], width))
    function = _function(cut, passes(rows, weight.bits), weight.bits, weight.is_gated, x.device)
    scales = None if weight.scales is None else weight.scales.view(torch.int32)
    programs = num_programs(cut, rows, weight.words.shape[0], processors(x.device))
    function(
        (programs, 1, 1), 32 * cut.warps, max(mma_shared_bytes(cut, rows, weight, programs), _alone(cut, x.device)),
        x, weight.words, scales, norm, bias, residual, y,
        rows, weight.outputs, weight.inputs, float(eps),
    )  # fmt: skip
    return y


def fits(cut: MmaCut, rows: int, weight: MmaPackedWeight, device: torch.device) -> bool:
    """Whether a processor has the shared memory for one of its programs."""
    programs = num_programs(cut, rows, weight.words.shape[0], processors(device))
    return mma_shared_bytes(cut, rows, weight, programs) + _DECLARED_BYTES <= most_shared_bytes(device)


def fitting_cuts(rows: int, weight: MmaPackedWeight, device: torch.device) -> list[MmaCut]:
    """The cuts that fit shared memory, in their order; many rows are too many for any, and come in halves."""
    return [cut for cut in CUTS if fits(cut, rows, weight, device)]


def num_programs(cut: MmaCut, rows: int, tiles: int, num_processors: int) -> int:
    """Among which the tiles are shared out: as many as run side by side, or so many that their sums fit.

    >>> num_programs(MmaCut(16, 4, 1), 1, 768, 132), num_programs(MmaCut(16, 4, 1), 8, 768, 132)
    (132, 256)
    """
    most = max(1, _MOST_SUMS_BYTES // (cut.warps * rows * ROWS * 4))
    return min(tiles, max(cut.programs * num_processors, -(-tiles // most)))


def mma_shared_bytes(cut: MmaCut, rows: int, weight: MmaPackedWeight, programs: int) -> int:
    """Shared memory of a program in bytes: what is on its way, the rows, and the sums of each warp."""
    sums = cut.warps * -(-weight.words.shape[0] // programs) * rows * ROWS * 4
    return (
        cut.warps * cut.depth * (1024 + (128 if weight.bits == 4 else 0))
        + rows * row_bytes(weight.inputs, weight.bits)
        + sums
    )


def row_bytes(inputs: int, bits: int) -> int:
    """Bytes of a row of x in shared memory: with 4 bits the four digits of each number, else as they are, and 16 bytes."""
    return 4 * inputs if bits == 4 else 2 * inputs + 16


def passes(rows: int, bits: int) -> int:
    """Passes of the matrix units over a weight: they take eight columns, a row with 4 bits is four of them, and else one."""
    return -(-rows // 2) if bits == 4 else 1


def _alone(cut: MmaCut, device: torch.device) -> int:
    """So many bytes that no processor takes more programs than `cut` says: one with more would be the last to end."""
    return most_shared_bytes(device) // (cut.programs + 1) + 512


@lru_cache(maxsize=64)
def most_shared_bytes(device: torch.device) -> int:
    """The most shared memory that a program may have, in bytes."""
    if device.type != "cuda":
        return 1 << 17
    properties: Any = torch.cuda.get_device_properties(device)  # torch's types lack this one
    return int(properties.shared_memory_per_block_optin)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; elsewhere, where kernels are only tried, 4."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4


@opaque(
    f"packed_linear_on_device{_ARGUMENTS}",
    lambda x, words, scales, outputs, inputs, bits, is_gated, bias, norm, eps, residual: x.new_empty(
        (*x.shape[:-1], outputs // 2 if is_gated else outputs)
    ),
)
def _on_device(
    x: Tensor, words: Tensor, scales: Tensor | None, outputs: int, inputs: int, bits: int, is_gated: bool,
    bias: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    weight = MmaPackedWeight(words, scales, outputs, inputs, bits, is_gated)
    cut = _SELECTED.get((outputs, inputs, bits))
    rows = x.numel() // inputs
    if cut is None or not fits(cut, rows, weight, x.device):
        cut = next(iter(fitting_cuts(rows, weight, x.device)), None)
    if cut is not None:
        return run_cut(cut, x, weight, bias, norm=norm, eps=eps, residual=residual)
    assert rows > 1  # what calls this has asked
    flat, added = x.reshape(rows, inputs), None if residual is None else residual.reshape(rows, -1)
    some = [
        _on_device(flat[part], *weight, bias, norm, eps, None if added is None else added[part])
        for part in (slice(rows // 2), slice(rows // 2, None))
    ]
    return torch.cat(some).view(*x.shape[:-1], -1)


def dense(t: Tensor) -> Tensor:
    """Beginning at a multiple of 16 bytes, as the kernel reads."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


@lru_cache(maxsize=512)
def _function(cut: MmaCut, num_passes: int, bits: int, is_gated: bool, device: torch.device) -> Function:
    return compiled(
        (*STEPS, _FOLDER / "streamed.cu"), "packed_linear", mma_constants(cut, num_passes, bits, is_gated), device
    )


def mma_constants(cut: MmaCut, num_passes: int, bits: int, is_gated: bool) -> dict[str, int]:
    """The constants of the compiled kernel."""
    sizes = {"WARPS": cut.warps, "DEPTH": cut.depth, "RESIDENT": max(1, 32 // cut.warps)}
    return {"BITS": bits, "PASSES": num_passes, "GATED": int(is_gated), **sizes}


def measure_cuts(
    weight: MmaPackedWeight,
    *,
    rows: int = 1,
    has_norm: bool = False,
    seconds: float = 0.5,
    copies: int | None = None,
    seed: int = 0,
) -> dict[MmaCut, float]:
    """Seconds a product of `rows` rows, by cut, fastest first; the fastest is taken from now on in this process.

    Each cut must first give the result of float64 as well as torch's own operations do: one that does not raises UsageError.
    They are timed in captured graphs, in turn, over `copies` of the weight that together exceed the cache (by default 2.5 times).
    Raises UsageError without a GPU, and for more rows than a processor has room for at once.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((rows, weight.inputs), generator=generator).to(weight.words.device, torch.bfloat16)
    norm = torch.ones_like(x[0]) if has_norm else None
    with torch.no_grad():
        why = why_no_mma_kernel(x, weight, norm)
        if why is not None:
            raise UsageError(f"nothing to measure: {why}")
        cuts = fitting_cuts(rows, weight, x.device)
        if not cuts:
            raise UsageError(
                f"nothing to measure: {rows} rows of {weight.inputs} numbers do not fit shared memory at once"
            )
        exact = reference_packed_linear(x.double(), weight, norm=None if norm is None else norm.double())
        usual = reference_packed_linear(x, weight, norm=norm)
        limit = 2 * relative_error(usual, exact) + torch.finfo(x.dtype).eps
        for cut in cuts:
            error = relative_error(run_cut(cut, x, weight, norm=norm), exact)
            if not error <= limit:
                raise UsageError(
                    f"the cut '{cut}' is {error:.3g} off float64, where {limit:.3g} is allowed; report this"
                )
        num = copies or num_copies(weight.num_bytes, x.device)
        weights = [weight, *(weight._replace(words=weight.words.clone()) for _ in range(num - 1))]
        graphs = {str(cut): captured_calls(partial(_run_all, cut, weights, x, norm)) for cut in cuts}
        seconds_of = graph_times(graphs, seconds)
    named = {str(cut): cut for cut in cuts}
    times = {named[name]: graph_s / num for name, graph_s in seconds_of.items()}
    use_cut(weight, next(iter(times)))
    return times


def _run_all(cut: MmaCut, weights: list[MmaPackedWeight], x: Tensor, norm: Tensor | None) -> None:
    for weight in weights:
        run_cut(cut, x, weight, norm=norm)
