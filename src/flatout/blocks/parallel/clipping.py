"""Gradients clipped by their norm where they are divided differently: DTensors of several meshes beside plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatout.core.errors import UsageError

_LEAST = 1e-6
"""Added to a norm before it divides, as torch.nn.utils.clip_grad_norm_ does."""


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a norm of at most `max_norm` together; the norm before, on the device.

    As torch.nn.utils.clip_grad_norm_ does, for DTensors (experts that are spread, FSDP2) beside plain ones. All ranks call it.
    Raises UsageError where a gradient is not reduced yet.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    norm = square_sum(gradients, gradients[0].device).sqrt()
    scale_down(gradients, norm, max_norm)
    return norm


def square_sum(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The sum of all squares, over the ranks that hold parts of them: one collective for each kind of division.

    Raises UsageError where a gradient is not reduced yet.
    """
    squares: dict[tuple[Any, Any], Tensor] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
        squares[key] = squares.get(key, torch.zeros((), device=device)) + _local(gradient).float().square().sum()
    for (mesh, placements), square in squares.items():
        for dim, place in enumerate(placements):
            if place.is_partial():
                raise UsageError("a gradient is a partial sum; reduce it before it is clipped")
            if not place.is_replicate():
                dist.all_reduce(square, group=mesh.get_group(dim))
    return sum(squares.values(), torch.zeros((), device=device))


def scale_down(gradients: Iterable[Tensor], norm: Tensor, most: float) -> None:
    """Scale gradients by the factor that makes `norm` at most `most`; the host does not wait for it."""
    factor = (most / (norm + _LEAST)).clamp_max(1.0)
    for gradient in gradients:
        _local(gradient).mul_(factor.to(gradient.dtype))


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
