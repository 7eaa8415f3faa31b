"""The routing of tokens: to which experts each one goes, its rows in the experts' order and back, and from rank to rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# N tokens, K experts a token, E experts, C channels, R rows (N * K, one for each expert of a token)
Scores = Literal["softmax", "sigmoid"]


class Routed(NamedTuple):
    """What the router has selected: `expert_NK`, `weight_NK` in float32, and every expert's `score_NE` before the bias."""

    expert_NK: Tensor
    weight_NK: Tensor
    score_NE: Tensor


class ExpertOrder(NamedTuple):
    """Rows sorted by expert: row i of the sorted is row `source_R[i]` of the unsorted, row j of the unsorted is at `place_R[j]`.

    `counts_E` are rows of each expert, on the device.
    """

    source_R: Tensor
    place_R: Tensor
    counts_E: Tensor


def select_experts(
    logits_NE: Tensor, bias_E: Tensor | None, *, num: int, scores: Scores, is_normalised: bool
) -> Routed:
    """The `num` experts of each token with the highest score.

    `bias_E` is added for the selection alone: weights are of scores without it (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    `is_normalised`: the weights of a token add to 1.
    """
    score_NE = logits_NE.softmax(-1) if scores == "softmax" else logits_NE.sigmoid()
    biased_NE = score_NE.detach() if bias_E is None else score_NE.detach() + bias_E
    expert_NK = biased_NE.topk(num, dim=-1, sorted=False).indices
    weight_NK = score_NE.gather(-1, expert_NK)
    if is_normalised:
        weight_NK = weight_NK / weight_NK.sum(-1, keepdim=True).clamp_min(1e-20)  # sigmoids of a token may all be 0
    return Routed(expert_NK, weight_NK, score_NE)


def ordered(expert_R: Tensor, num_experts: int) -> ExpertOrder:
    """The order of rows by expert, rows of one expert in the order in which they were. No wait of the host."""
    source = torch.argsort(expert_R, stable=True)
    place = torch.empty_like(source)
    place[source] = torch.arange(len(source), device=source.device)
    # not bincount, which reads its largest value on the host
    counts = torch.zeros(num_experts, dtype=torch.int64, device=expert_R.device)
    counts.scatter_add_(0, expert_R, torch.ones_like(expert_R))
    return ExpertOrder(source, place, counts)


def balance_loss(score_NE: Tensor, share_E: Tensor) -> Tensor:
    """E * sum over experts of (share of the rows) * (mean score), 1 when all is even.

    Switch Transformer (arXiv 2101.03961, equations 4 to 6; there for one expert a token), after GShard (arXiv 2006.16668).
    Scores are taken as shares of their sum, which changes sigmoids alone. The gradient is of the scores: shares have none.
    """
    mean_E = (score_NE / score_NE.sum(-1, keepdim=True).clamp_min(1e-20)).sum(0) / max(len(score_NE), 1)
    return mean_E.dot(share_E) * score_NE.shape[1]


def expert_rows(x_NC: Tensor, order: ExpertOrder, num: int) -> Tensor:
    """A row for each expert of each token, sorted by expert. Its gradient adds a token's rows in one order, always the same."""
    out: Tensor = _ExpertRows.apply(x_NC, order.source_R, order.place_R, num)  # type: ignore[no-untyped-call]
    return out


def combined(rows_RC: Tensor, order: ExpertOrder, weight_NK: Tensor) -> Tensor:
    """Each token's rows by their weights, added: out_NC, in the dtype of the rows."""
    N, K = weight_NK.shape
    rows_NKC = permute_rows(rows_RC, order.place_R, order.source_R).view(N, K, rows_RC.shape[-1])
    return (rows_NKC * weight_NK.to(rows_RC.dtype).unsqueeze(-1)).sum(1)


def permute_rows(rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """`rows[index]`, where `index` is a permutation and `inverse` undoes it: the gradient is a copy, too, and adds nothing."""
    out: Tensor = _Permuted.apply(rows, index, inverse)  # type: ignore[no-untyped-call]
    return out


def exchanged(rows: Tensor, *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Rows to and from all ranks of a group: the first `send[0]` rows to its rank 0, and so on. All ranks call it."""
    out: Tensor = _Exchanged.apply(rows, list(send), list(receive), group)  # type: ignore[no-untyped-call]
    return out


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, source: Tensor, place: Tensor, num: int) -> Tensor:
        ctx.save_for_backward(place)
        ctx.num = num
        return x_NC.index_select(0, source.div(num, rounding_mode="floor"))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place).view(len(place) // ctx.num, ctx.num, grad.shape[-1]).sum(1), None, None, None


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.exchange = (send, receive, group)
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.exchange
        return _all_to_all(grad, receive, send, group), None, None, None


def _all_to_all(rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(receive), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
    return out
