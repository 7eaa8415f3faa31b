"""Gradients that cannot be differentiated again, and say so when they are.

`torch.autograd.function.once_differentiable` says it only where the incoming gradient itself needs one; a penalty on the
gradient of a plain loss would be taken for a constant without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flatout.errors import UsageError

Backward = Callable[..., tuple[Tensor | None, ...]]


def once(backward: Backward) -> Backward:
    """A decorator of the backward pass of an autograd function: it is not recorded, and who differentiates its results is
    told."""

    @wraps(backward)
    def told(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            made = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return made
        return tuple(None if t is None else _guarded(t) for t in made)

    return told


def _guarded(gradient: Tensor) -> Tensor:
    guarded: Tensor = _NotAgain.apply(gradient.detach().requires_grad_())  # type: ignore[no-untyped-call]
    return guarded


class _NotAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise UsageError(
            "the gradient of a fused kernel is differentiated again, and it has no second one; "
            "name the reference, kernel='<operation>.reference', which has"
        )
