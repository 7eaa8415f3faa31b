"""The loss and its gradients made together, in the forward pass, so that no product is done twice.

N tokens, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.blocks.kernels.linear_cross_entropy.sizes import summed_in
from flatout.blocks.kernels.opaque import once

ROWS_ARGUMENTS: Final = (
    "(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, Tensor scales, int ignore_index, float label_smoothing, "
    "float z_loss, float softcap, int chunk, ScalarType dtype, bool needs_hidden, bool needs_weight, bool needs_bias) -> Tensor[]"
)
"""What a pass over all chunks takes: `scales` (N,) multiplies the gradient of each token's logits, `softcap` is 0 for none,
`chunk` 0 for one that suits, `dtype` that of the products. It returns the losses of the tokens, and the gradients of hidden,
weight and bias, empty where they are not needed; in the dtype of what they are gradients of, or float32 of the weight and bias
when the products are float16."""


class LossPasses(NamedTuple):
    """One implementation: its pass over the chunks, and its product in place with a number on the device."""

    rows: Callable[..., list[Tensor]]
    scale: Callable[[Tensor, Tensor], Tensor]


class LossOptions(NamedTuple):
    """What a pass takes besides tensors, in the order of ROWS_ARGUMENTS."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    chunk: int
    dtype: torch.dtype
    needs_hidden: bool
    needs_weight: bool
    needs_bias: bool

    @property
    def needs(self) -> tuple[bool, bool, bool]:
        return self.needs_hidden, self.needs_weight, self.needs_bias


def pass_shapes(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, scales: Tensor, *options: Any
) -> list[Tensor]:
    """What a pass returns, without numbers."""
    how = LossOptions(*options)
    wide = torch.float32 if how.dtype == torch.float16 else None
    none = hidden.new_empty(0)
    return [
        scales.new_empty(targets.shape),
        torch.empty_like(hidden, memory_format=torch.contiguous_format) if how.needs_hidden else none,
        torch.empty_like(weight, dtype=wide, memory_format=torch.contiguous_format)
        if how.needs_weight
        else none.clone(),
        torch.empty_like(bias, dtype=wide) if how.needs_bias and bias is not None else none.clone(),
    ]


def loss_of(
    passes: LossPasses,
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    bias_V: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
) -> Tensor:
    """The reference's loss, by this implementation; gradients are made only where autograd records."""
    kind = hidden_ND.device.type
    how = LossOptions(
        ignore_index,
        label_smoothing,
        z_loss,
        softcap or 0.0,
        chunk or 0,
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype,
        *(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden_ND, weight_VD, bias_V)),
    )
    result: Tensor = _LinearCrossEntropy.apply(passes, how, reduction, hidden_ND, weight_VD, targets_N, bias_V)  # type: ignore[no-untyped-call]
    return result


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: LossPasses, how: LossOptions, reduction: str, *inputs: Any) -> Tensor:
        hidden_ND, weight_VD, targets_N, bias_V = inputs
        ctx.passes, ctx.how, ctx.is_reduced = passes, how, reduction != "none"
        ctx.dtypes = [t.dtype if t is not None else None for t in (hidden_ND, weight_VD, bias_V)]
        scales_N = (targets_N != how.ignore_index).to(torch.float64 if how.dtype == torch.float64 else torch.float32)
        if not ctx.is_reduced:
            ctx.save_for_backward(*inputs)
            return passes.rows(*inputs, scales_N, *how[:-3], False, False, False)[0]
        share = scales_N.sum().reciprocal() if reduction == "mean" else scales_N.new_ones(())
        # A probability over N would be lost in float16, whose least number is 6e-8, and GradScaler's factor comes only in the
        # backward pass: the mean's divisor is applied there.
        ctx.is_late = how.dtype == torch.float16 and reduction == "mean"
        if reduction == "mean" and not ctx.is_late:
            scales_N = scales_N * share
        losses_N, *gradients = passes.rows(*inputs, scales_N, *how)
        ctx.save_for_backward(share, *gradients)
        return torch.mul(losses_N.sum(), share)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.is_reduced:
            share, *gradients = ctx.saved_tensors
            # Where nothing is kept the share is infinite, and the gradients are 0.
            factor = grad * share.where(share.isfinite(), 0.0) if ctx.is_late else grad
            gradients = [_scaled(ctx.passes, g, factor) for g in gradients]
        else:
            _, *gradients = ctx.passes.rows(*ctx.saved_tensors, grad.contiguous(), *ctx.how)
        hidden, weight, bias = (
            g.to(dtype) if is_needed else None
            for g, dtype, is_needed in zip(gradients, ctx.dtypes, ctx.how.needs, strict=True)
        )
        return None, None, None, hidden, weight, None, bias


def _scaled(passes: LossPasses, gradient: Tensor, factor: Tensor) -> Tensor:
    """The product, in the gradient's own memory when nobody will ask for it again.

    A second backward pass of a graph that is kept needs the gradient as it was; a compiled graph decides for itself.
    """
    is_traced = type(gradient) is not Tensor
    if is_traced or torch._C._autograd._get_current_graph_task_keep_graph():
        return gradient * factor
    return passes.scale(gradient, factor)


Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype | None]


def gradients_by_chunks(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    losses: Callable[[slice, Tensor], None],
    *,
    how: LossOptions,
    chunk: int,
    dtypes: Dtypes,
) -> list[Tensor]:
    """The gradients of hidden, weight and bias, each in memory of its own, empty where it is not needed.

    Tensors are multiplied as they are given; `dtypes` are those of what the gradients are for. `losses` takes the rows of a chunk
    and their logits (C, V), and leaves their gradient in the logits' place where one is needed. Sums have a dtype of their own,
    see `summed_in`; those of float16 products come unscaled, wide as they were summed.
    """
    num_tokens, device = len(hidden_ND), hidden_ND.device
    num_chunks, none = math.ceil(num_tokens / chunk), hidden_ND.new_empty(0)
    dtype = summed_in(num_chunks=num_chunks, weight=dtypes[1], product=hidden_ND.dtype)
    of_hidden_ND = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format) if how.needs_hidden else none
    make = torch.empty if num_chunks else torch.zeros
    of_weight_VD = make(weight_VD.shape, dtype=dtype, device=device) if how.needs_weight else none
    wide = torch.promote_types(dtype, torch.float32)
    of_bias_V = torch.zeros(len(weight_VD), dtype=wide, device=device) if how.needs_bias else none
    with torch.autocast(device.type, enabled=False):
        # One buffer serves all chunks: fresh memory would cost a page fault for every 4 KiB of each.
        buffer_CV = torch.empty(min(chunk, num_tokens), len(weight_VD), dtype=hidden_ND.dtype, device=device)
        for start in range(0, num_tokens, chunk):
            at = slice(start, min(start + chunk, num_tokens))
            logits_CV = buffer_CV[: at.stop - start]
            if bias_V is None:
                torch.mm(hidden_ND[at], weight_VD.t(), out=logits_CV)
            else:
                torch.addmm(bias_V, hidden_ND[at], weight_VD.t(), out=logits_CV)
            losses(at, logits_CV)
            if how.needs_hidden:
                torch.mm(logits_CV, weight_VD, out=of_hidden_ND[at])
            if how.needs_weight:
                _add_product(of_weight_VD, logits_CV.t(), hidden_ND[at], is_first=start == 0)
            if how.needs_bias:
                of_bias_V += logits_CV.sum(dim=0, dtype=wide)
            del logits_CV
        del buffer_CV
    is_unscaled = hidden_ND.dtype == torch.float16
    return [
        t.new_empty(0)
        if not is_needed
        else t
        if wanted is None or (is_unscaled and t is not of_hidden_ND)
        else t.to(wanted)
        for t, wanted, is_needed in zip((of_hidden_ND, of_weight_VD, of_bias_V), dtypes, how.needs, strict=True)
    ]


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """`total += a @ b`, and `total = a @ b` for the first.

    In one pass where the library can: PyTorch's products on GPUs take 16-bit factors into a float32 sum (`out_dtype`, from 2.8;
    with a float32 summand from 2.10).
    """
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if is_first else total.addmm_(a, b)
    elif not total.is_cuda:
        total.copy_(a @ b) if is_first else total.add_(a @ b)
    elif is_first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
