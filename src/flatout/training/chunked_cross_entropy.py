"""Cross entropy over a large vocabulary without the logits of all tokens in memory at once.

N tokens, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    chunk: int = 1024,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias), targets)`, `chunk` tokens at a time.

    `hidden` is (..., D), `weight` (V, D), `bias` (V,) and `targets` (...), class numbers; the mean is over targets that are not
    `ignore_index`. Logits and gradients of a chunk are made one after the other in the forward pass, so that C x V numbers are
    alive and not N x V, and no product is done twice. Sums are float32, or float64 for float64 inputs. The gradient cannot be
    differentiated again.
    """
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1), bias, ignore_index, chunk
    )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        targets_N: Tensor,
        bias_V: Tensor | None,
        ignore_index: int,
        chunk: int,
    ) -> Tensor:
        total = torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32
        needs_hidden, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=total) if needs_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=total) if needs_bias and bias_V is not None else None
        kept_N = targets_N != ignore_index
        share = kept_N.sum().to(total).reciprocal()
        loss = torch.zeros((), dtype=total, device=hidden_ND.device)
        for start in range(0, hidden_ND.shape[0], chunk):
            rows = slice(start, start + chunk)
            hidden_CD, kept_C = hidden_ND[rows], kept_N[rows]
            product_CV = F.linear(hidden_CD, weight_VD, bias_V)
            logits_CV = product_CV.to(total)
            places_C1 = targets_N[rows].where(kept_C, 0).unsqueeze(1)
            norm_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
            own_C1 = norm_C1 - logits_CV.gather(1, places_C1)
            loss += own_C1.squeeze(1).where(kept_C, 0.0).sum()
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            grad_CV = (logits_CV - norm_C1).exp_()
            grad_CV.scatter_add_(1, places_C1, torch.full_like(own_C1, -1.0))
            grad_CV = grad_CV.mul_((kept_C * share).unsqueeze(1)).to(product_CV.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = grad_CV @ weight_VD.to(grad_CV.dtype)
            if grad_weight is not None:
                grad_weight += grad_CV.T @ hidden_CD.to(grad_CV.dtype)
            if grad_bias is not None:
                grad_bias += grad_CV.sum(dim=0)
        ctx.dtypes = weight_VD.dtype, None if bias_V is None else bias_V.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            hidden * grad.to(hidden.dtype) if hidden is not None else None,
            (weight * grad).to(weight_dtype) if weight is not None else None,
            None,
            (bias * grad).to(bias_dtype) if bias is not None else None,
            None,
            None,
        )
