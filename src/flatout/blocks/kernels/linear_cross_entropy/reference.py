"""The cross entropy of a linear layer's result, all logits at once: what the other kernels must return.

N tokens, D width, V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.core.parts import kernel


def reference_linear_cross_entropy(
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
    """Products in the dtype of the inputs (autocast's where it is on), all that follows in float32, float64 for float64.

    With z the logits, or `softcap * tanh(z / softcap)`, and L their logsumexp, a token costs
    `L - (1 - s) z[target] - s mean(z) + z_loss L^2`, s the label smoothing; nothing when its target is `ignore_index`.
    """
    losses_N = losses_of_logits(
        F.linear(hidden_ND, weight_VD, bias_V),
        targets_N,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
    )
    if reduction == "none":
        return losses_N
    return losses_N.sum() if reduction == "sum" else losses_N.sum() / (targets_N != ignore_index).sum()


def losses_of_logits(
    logits_NV: Tensor,
    targets_N: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """What each token costs, in float32, float64 for float64."""
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    losses_N = F.cross_entropy(
        logits_NV, targets_N, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    if z_loss:
        losses_N = losses_N + z_loss * logits_NV.logsumexp(dim=1).square().where(targets_N != ignore_index, 0.0)
    return losses_N


KERNEL = kernel(__name__, "All logits at once", reference_linear_cross_entropy, order=1000, guarantee="exact")
