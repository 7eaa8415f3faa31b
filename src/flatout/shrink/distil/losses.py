"""What a student is to be near to: the teacher's distribution over classes, whole or its likeliest ones, and its features.

Legend: B samples, T places in a sample, V classes, K of them kept, C channels.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.core.errors import UsageError

IGNORED: Final = -100
"""The target of places that do not count, as in torch's cross entropy."""


def logit_loss(student: Tensor, teacher: Tensor, *, temperature: float = 2.0, counted: Tensor | None = None) -> Tensor:
    """T^2 KL(teacher || student) of the softened distributions over the last dimension, mean over all places.

    Both are divided by `temperature` before the softmax; T^2 keeps the gradient's size when it is changed (Hinton, Vinyals and
    Dean 2015, section 2). `counted` [...] leaves out places where it is false. Summed in float32, or float64 if given. Raises
    UsageError for other shapes or a temperature that is not above 0.

    >>> logit_loss(torch.zeros(2, 3), torch.zeros(2, 3)).item()
    0.0
    """
    _check_temperature(temperature)
    if student.shape != teacher.shape:
        raise UsageError(
            f"the student's logits are {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}; they must have the "
            "same classes, in the same order"
        )
    dtype = _wide(student.dtype)
    log_q = F.log_softmax(student.to(dtype) / temperature, -1)
    log_p = F.log_softmax(teacher.detach().to(dtype) / temperature, -1)
    return temperature**2 * _mean((log_p.exp() * (log_p - log_q)).sum(-1), counted)


def top_k_loss(
    student: Tensor,
    values: Tensor,
    places: Tensor,
    rest: Tensor,
    *,
    temperature: float,
    counted: Tensor | None = None,
) -> Tensor:
    """Divergence as `logit_loss` has it, of K + 1 outcomes: the teacher's K likeliest classes, and all others as one.

    `values` and `places` [..., K] are the teacher's largest logits and their classes, `rest` [...] the logsumexp of the other
    logits over `temperature`; it holds for that temperature alone. Merging outcomes never makes a divergence larger, so this is a
    lower bound of `logit_loss`, and equal to it for K = V - 1.
    """
    _check_temperature(temperature)
    is_fitting = student.shape[:-1] == values.shape[:-1] == rest.shape and values.shape == places.shape
    if not is_fitting or values.shape[-1] >= student.shape[-1]:
        raise UsageError(
            f"student {tuple(student.shape)}, values {tuple(values.shape)}, places {tuple(places.shape)} and rest "
            f"{tuple(rest.shape)} do not fit; give [..., V], [..., K], [..., K], [...] with K below V"
        )
    dtype = _wide(student.dtype)
    z = student.to(dtype) / temperature
    places = places.long()
    inside = torch.cat([values.to(dtype) / temperature, rest.to(dtype)[..., None]], -1)
    log_p = F.log_softmax(inside, -1)
    others = z.scatter(-1, places, float("-inf")).logsumexp(-1)
    log_q = F.log_softmax(torch.cat([z.gather(-1, places), others[..., None]], -1), -1)
    return temperature**2 * _mean((log_p.exp() * (log_p - log_q)).sum(-1), counted)


def top_k(logits: Tensor, *, num: int, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logits of a teacher, their classes, and the rest, as `top_k_loss` takes them."""
    _check_temperature(temperature)
    if not 0 < num < logits.shape[-1]:
        raise UsageError(f"{num} of {logits.shape[-1]} classes cannot be kept; give 1 to {logits.shape[-1] - 1}")
    values, places = logits.topk(num, -1)
    softened = logits.to(_wide(logits.dtype)) / temperature
    rest = softened.scatter(-1, places, float("-inf")).logsumexp(-1)
    return values, places, rest


def hard_loss(student: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of logits [..., V] against classes [...]; a target of -100 does not count."""
    if targets.shape != student.shape[:-1]:
        raise UsageError(
            f"targets {tuple(targets.shape)} do not fit logits {tuple(student.shape)}: classes are the last dimension; for other "
            "tasks give hard=, a function of outputs and targets"
        )
    return F.cross_entropy(student.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def hint_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean squared difference of features over the teacher's mean square: 0 is equal, 1 is as far as zeros are.

    FitNets (Romero et al. 2015) without the division, which makes the loss the same for features of any scale.
    """
    goal = teacher.detach()
    return F.mse_loss(student, goal) / goal.square().mean().clamp_min(torch.finfo(goal.dtype).tiny)


def attention_loss(student_BCX: Tensor, teacher_BCX: Tensor) -> Tensor:
    """Squared distance of where two layers look: channels' squares added up, and scaled to length 1 a sample.

    Attention transfer (Zagoruyko and Komodakis 2017, section 3.1): any numbers of channels, the same places.
    """
    if student_BCX.shape[2:] != teacher_BCX.shape[2:] or student_BCX.dim() < 3:
        raise UsageError(
            f"features {tuple(student_BCX.shape)} and {tuple(teacher_BCX.shape)} have not the same places after [B, C]; "
            "choose layers of one resolution, or kind='hint'"
        )
    own, goal = (F.normalize(x.square().sum(1).flatten(1), dim=1) for x in (student_BCX, teacher_BCX.detach()))
    return F.mse_loss(own, goal, reduction="sum") / len(student_BCX)


def _mean(losses: Tensor, counted: Tensor | None) -> Tensor:
    if counted is None:
        return losses.mean()
    return torch.where(counted, losses, 0.0).sum() / counted.sum().clamp_min(1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise UsageError(f"temperature {temperature:g} is not above 0; 1 leaves the teacher's distribution as it is")
