"""The loss some tokens at a time, by PyTorch's own operators: what a CPU runs.

N tokens, K of them kept, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from flatout.kernels.linear_cross_entropy.gradient import ROWS_ARGUMENTS, Way, loss_of, shapes
from flatout.kernels.linear_cross_entropy.products import Gradients
from flatout.kernels.linear_cross_entropy.sizes import device_chunk, host_chunk
from flatout.kernels.opaque import opaque
from flatout.records.kernel import Kernel


@opaque("linear_cross_entropy_chunked" + ROWS_ARGUMENTS, shapes)
def rows(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None,
    scales_N: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    dtype: torch.dtype,
    needs_hidden: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> list[Tensor]:
    """See ROWS_ARGUMENTS."""
    kept_K = _kept(targets_N, ignore_index)
    hidden_KD, targets_K, scales_K = hidden_ND[kept_K].to(dtype), targets_N[kept_K], scales_N[kept_K]
    product_VD, product_V = weight_VD.to(dtype), bias_V.to(dtype) if bias_V is not None else None
    num_tokens, vocabulary, needs = len(hidden_KD), len(weight_VD), (needs_hidden, needs_weight, needs_bias)
    chunk = chunk or _chunk(hidden_KD, vocabulary)
    num_chunks = math.ceil(num_tokens / chunk)
    is_kept_K = targets_K != ignore_index
    places_K = targets_K.where(is_kept_K, 0)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        gradients = Gradients(hidden_KD, product_VD, needs=needs, weight_dtype=weight_VD.dtype, num_chunks=num_chunks)
        losses_K = torch.empty_like(scales_K)
        # One buffer serves all chunks: fresh memory would cost a page fault for every 4 KiB of each.
        buffer_CV = torch.empty(min(chunk, num_tokens), vocabulary, dtype=dtype, device=hidden_ND.device)
        for start in range(0, num_tokens, chunk):
            at = slice(start, min(start + chunk, num_tokens))
            logits_CV = buffer_CV[: at.stop - start]
            _multiply(hidden_KD[at], product_VD, product_V, logits_CV)
            wide_CV = logits_CV.to(scales_N.dtype)
            capped_CV = wide_CV.div_(softcap).tanh_().mul_(softcap).clone() if softcap else None
            losses_K[at], norms_C1, totals_C1 = _losses(wide_CV, places_K[at], label_smoothing, z_loss)
            if any(needs):
                factors_C1 = scales_K[at].where(is_kept_K[at], 0.0).unsqueeze(1)
                wide_CV.mul_(factors_C1 * (1 + 2 * z_loss * norms_C1) / totals_C1)
                _less_targets(wide_CV, places_K[at], factors_C1, label_smoothing)
                if capped_CV is not None:
                    wide_CV.mul_(1 - capped_CV.div_(softcap).square_())
                gradients.add(at, wide_CV if wide_CV is logits_CV else logits_CV.copy_(wide_CV))
    losses_N = torch.zeros_like(scales_N)
    losses_N[kept_K] = losses_K.where(is_kept_K, 0.0)
    is_unscaled = dtype == torch.float16
    hidden, weight, bias = gradients.results(
        hidden_ND.dtype,
        None if is_unscaled else weight_VD.dtype,
        None if is_unscaled or bias_V is None else bias_V.dtype,
    )
    if needs_hidden and not isinstance(kept_K, slice):
        hidden = torch.zeros_like(hidden_ND, memory_format=torch.contiguous_format).index_copy_(0, kept_K, hidden)
    return [losses_N, hidden, weight, bias]


def _kept(targets_N: Tensor, ignore_index: int) -> Tensor | slice:
    """The rows that cost products. On a device the host would have to wait for their number; there all do."""
    if targets_N.is_cpu:
        is_kept_N = targets_N != ignore_index
        if not is_kept_N.all():
            return is_kept_N.nonzero().squeeze(1)
    return slice(None)


def _chunk(hidden_KD: Tensor, vocabulary: int) -> int:
    num_tokens, width = hidden_KD.shape
    if hidden_KD.is_cpu:
        return host_chunk(num_tokens=num_tokens, vocabulary=vocabulary)
    return device_chunk(num_tokens=num_tokens, width=width)


def _multiply(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, logits_CV: Tensor) -> None:
    if bias_V is None:
        torch.mm(hidden_CD, weight_VD.t(), out=logits_CV)
    else:
        torch.addmm(bias_V, hidden_CD, weight_VD.t(), out=logits_CV)


def _losses(
    logits_CV: Tensor, places_C: Tensor, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, the logsumexps, and the sums of what the logits become: exponentials, the largest 1."""
    own_C1 = logits_CV.gather(1, places_C.unsqueeze(1))
    mean_C1 = logits_CV.mean(dim=1, keepdim=True) if label_smoothing else 0.0
    top_C1 = logits_CV.amax(dim=1, keepdim=True)
    totals_C1 = logits_CV.sub_(top_C1).exp_().sum(dim=1, keepdim=True)
    norms_C1 = top_C1 + totals_C1.log()
    losses_C1 = norms_C1 - (1 - label_smoothing) * own_C1 - label_smoothing * mean_C1
    if z_loss:
        losses_C1 = losses_C1 + z_loss * norms_C1.square()
    return losses_C1.squeeze(1), norms_C1, totals_C1


def _less_targets(gradient_CV: Tensor, places_C: Tensor, factors_C1: Tensor, label_smoothing: float) -> None:
    """Takes the distribution that was wanted from the one that was given."""
    if label_smoothing:
        gradient_CV.sub_(factors_C1 * (label_smoothing / gradient_CV.shape[1]))
    gradient_CV.scatter_add_(1, places_C.unsqueeze(1), factors_C1 * (label_smoothing - 1))


def _scale(gradient: Tensor, factor: Tensor) -> Tensor:
    if factor.is_cpu and factor.item() == 1.0:
        return gradient
    return gradient.mul_(factor)


def refusal(*arguments: object, **options: object) -> None:
    """It takes everything."""


KERNEL = Kernel(
    id="linear_cross_entropy.chunked",
    op="linear_cross_entropy",
    title="In chunks of tokens, by PyTorch's operators",
    module=__name__,
    run=partial(loss_of, Way(rows, _scale)),
    refusal=refusal,
    order=500,
)
