"""Models and numbers in float64, and how far other outputs are from theirs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatout.core.tensors.nests import tree_leaves, tree_map_only
from flatout.shrink.module_mode import in_mode

N = TypeVar("N")


def float64_copy(model: nn.Module) -> nn.Module:
    """A copy of the model in float64 and in eval mode."""
    return copy.deepcopy(model).double().eval()


def to_float64(nest: N) -> N:
    """The nest with its floating-point tensors in float64 and detached, all else as it is."""
    converted: N = tree_map_only(Tensor, lambda t: t.detach().double() if t.is_floating_point() else t.detach(), nest)
    return converted


def float64_tensors(outputs: object) -> list[Tensor]:
    """The floating-point tensors among a model's outputs, in float64."""
    return [t.double() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


def float64_outputs(model: nn.Module, inputs: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> list[Tensor]:
    """Floating-point outputs of a float64 copy of the model, without gradients, each module in the mode that it is in."""
    exact = copy.deepcopy(model).double()
    with torch.no_grad():
        return float64_tensors(exact(*to_float64(tuple(inputs)), **to_float64(dict(keywords or {}))))


def relative_norm_error(outputs: object, exact: Sequence[Tensor]) -> float:
    """The largest distance of an output from the exact one, over the exact one's norm; infinite for NaN or another shape."""
    worst = 0.0
    for found, wanted in zip(float64_tensors(outputs), exact, strict=True):
        norm = float(wanted.norm())
        off = float((found - wanted).norm()) if found.shape == wanted.shape else float("nan")
        worst = max(worst, off / norm if norm > 0 else off) if off == off else float("inf")
    return worst


def relative_error_to_float64(outputs: Sequence[object], exact: Sequence[object]) -> float:
    """The largest difference of one number, over the largest number of its output; infinite where shapes differ.

    What is no tensor must be equal, unless the exact one is None.
    """
    if len(outputs) != len(exact):
        return float("inf")
    worst = 0.0
    for found, wanted in zip(outputs, exact, strict=True):
        if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
            worst = worst if found == wanted or wanted is None else float("inf")
        elif found.shape != wanted.shape:
            return float("inf")
        elif found.numel():
            whole = wanted.double()
            error = float((found.double() - whole).abs().max() / whole.abs().max().clamp(min=1e-6))
            worst = max(worst, error if error == error else float("inf"))
    return worst


@torch.no_grad()
def measured_error(
    model: nn.Module, inputs: Sequence[Any], *, exact: list[Tensor] | None = None
) -> tuple[list[Tensor], float]:
    """The outputs of the model in float64 (or those given), and how far its own are from them, over their largest number.

    Both in eval mode; the mode of every module is put back.
    """
    with in_mode(model, is_training=False):
        if exact is None:
            exact = float64_outputs(model, inputs)
        outputs = float64_tensors(model(*inputs))
    scale = max((float(e.abs().max()) for e in exact), default=0.0)
    distance = max((float((o - e).abs().max()) for o, e in zip(outputs, exact, strict=True)), default=0.0)
    return exact, distance / scale if scale else distance
