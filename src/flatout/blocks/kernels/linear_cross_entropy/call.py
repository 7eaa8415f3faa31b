"""`flatout.linear_cross_entropy`: the public function, which checks its arguments and selects a kernel."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.opaque import Side, composed
from flatout.blocks.kernels.selection import kernel_for
from flatout.core.errors import UsageError

_REDUCTIONS: Final = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    num_kept: int | None = None,
    float8: bool = False,
    kernel: str | None = None,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets)` without the logits of all tokens in memory at once.

    `hidden` is (..., D), `weight` (V, D), `bias` (V,), and `targets` class numbers, (...) or all in a row. The losses of the
    tokens, sums and the result are float32 (float64 for float64); products have the dtype of the inputs, under autocast its
    dtype. The mean is over targets that are not `ignore_index`: NaN, with gradients of 0, when there is none, as PyTorch's.
    `z_loss` adds that multiple of the squared logsumexp to each token's loss; `softcap` replaces logits z by
    `softcap * tanh(z / softcap)`.

    Logits are made `chunk` tokens at a time (chosen from the sizes when None), and with "mean" and "sum" their gradients at
    once, in the forward pass, so that no product is done twice; with "none" the backward pass makes the logits again. The host
    waits for nothing on the device. There, tokens that are ignored cost their products, unless `num_kept` tells how many are
    not, or a bound above it: only so many rows are then multiplied (too small a bound makes the loss NaN, never a loss of some
    of the tokens). A class number outside of the vocabulary is an error on a CPU and makes the loss NaN on a GPU. The gradient
    cannot be differentiated again.

    With `float8` the three products are of float8 numbers: hidden and weight rounded to e4m3 with one scale each, the gradient of
    the logits to e5m2; sums are float32, logits 16 bits. The loss is off by some 0.1 %, gradients by some 5 %: training may get
    less far, and only its metric tells. A larger chunk of logits is in memory then, in one more copy. GPUs with units for
    float8 gain (compute capability 8.9 and later); others, and CPUs, compute the same numbers slower than without.

    `kernel` is the id of the implementation, by default the first that can run: `linear_cross_entropy.triton`, `.chunked`,
    `.reference`, or with float8 `linear_cross_entropy.float8.triton`, `.reference`. Raises UsageError for shapes and options that
    do not fit, and for a kernel that cannot run them.

    >>> hidden, weight = torch.ones(2, 3, 8), torch.zeros(5, 8)
    >>> targets = torch.tensor([[0, 1, 2], [3, 4, -100]])
    >>> linear_cross_entropy(hidden, weight, targets)
    tensor(1.6094)
    """
    _check(hidden, weight, targets, bias)
    how: dict[str, Any] = {"label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap, "chunk": chunk}
    how |= {"ignore_index": ignore_index, "reduction": reduction}
    _check_options(num_kept, **how)
    return _run(hidden, weight, targets, bias, num_kept=num_kept, float8=float8, kernel=kernel, **how)


@composed(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, *, int ignore_index, "
    "float label_smoothing, float z_loss, float? softcap, str reduction, SymInt? chunk, SymInt? num_kept, bool float8, "
    "str? kernel) -> Tensor"
)
def _run(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Side,
    *,
    num_kept: int | None,
    float8: bool,
    kernel: str | None,
    **how: Any,
) -> Tensor:
    hidden_ND, targets_N = hidden.reshape(targets.numel(), hidden.shape[-1]), targets.reshape(-1).to(torch.int64)
    num_all: Tensor | None = None
    if num_kept is not None and num_kept < targets_N.shape[0]:
        is_ignored_N = targets_N == how["ignore_index"]
        num_all = targets_N.shape[0] - is_ignored_N.sum()
        rows = is_ignored_N.to(torch.uint8).sort(stable=True).indices[:num_kept]
        hidden_ND, targets_N = hidden_ND[rows], targets_N[rows]
    inputs = (hidden_ND, weight, targets_N, bias)
    op = "linear_cross_entropy.float8" if float8 else "linear_cross_entropy"
    loss: Tensor = kernel_for(op, kernel, *inputs, **how).run(*inputs, **how)
    if num_all is not None and num_kept is not None:
        loss = loss.where(num_all <= num_kept, float("nan"))
    return loss.reshape(targets.shape) if how["reduction"] == "none" else loss


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise UsageError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not multiply; give (..., D) and (V, D), "
            "the weight as nn.Linear holds it"
        )
    if targets.shape not in (hidden.shape[:-1], (math.prod(hidden.shape[:-1]),)):
        raise UsageError(
            f"targets {tuple(targets.shape)} are not one for each row of hidden {tuple(hidden.shape)}; "
            f"give class numbers of shape {tuple(hidden.shape[:-1])}, or as many in a row"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise UsageError(f"targets are {targets.dtype}; give class numbers (torch.int64), not probabilities")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UsageError(f"bias {tuple(bias.shape)} is not one number for each of {weight.shape[0]} classes")
    kind = hidden.device.type
    others = [t.dtype for t in (weight, bias) if t is not None and t.dtype != hidden.dtype]
    if others and not torch.is_autocast_enabled(kind):
        raise UsageError(
            f"hidden is {hidden.dtype}, weight or bias {others[0]}; products need one dtype: cast, or run under torch.autocast"
        )


def _check_options(
    num_kept: int | None, *, label_smoothing: float, z_loss: float, softcap: float | None, reduction: str, **others: Any
) -> None:
    if not 0 <= label_smoothing <= 1:
        raise UsageError(f"label_smoothing {label_smoothing} is outside of 0..1")
    if z_loss < 0 or (softcap is not None and softcap <= 0):
        raise UsageError(f"z_loss {z_loss} must not be negative, softcap {softcap} must be positive or None")
    if reduction not in _REDUCTIONS:
        raise UsageError(f"reduction '{reduction}' is none of {', '.join(_REDUCTIONS)}")
    chunk = others["chunk"]
    if chunk is not None and chunk < 1:
        raise UsageError(f"chunk {chunk} is not a number of tokens; give 1 or more, or None to have it chosen")
    if num_kept is not None and (num_kept < 0 or reduction == "none"):
        raise UsageError(
            f"num_kept {num_kept} with reduction '{reduction}': give 0 or more, and only with a reduction to one number"
        )
