"""Low-rank pairs written into the weights: summed in float64, rounded once, what was there kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.adapt.low_rank import pair_of
from flatout.shrink.float64_reference import float64_outputs, float64_tensors
from flatout.shrink.module_mode import in_mode


@torch.no_grad()
def merge_weights(model: nn.Module, hosts: Sequence[str]) -> tuple[dict[str, Tensor], float]:
    """What the weights were, by name, and the largest rounding error over a weight's largest number.

    Raises UsageError, before it changes anything, where a weight is shared with another module: that would change, too.
    """
    for host in hosts:
        _check_unshared(model, host)
    replaced, worst = {}, 0.0
    for host in hosts:
        path, _, name = host.partition("/")
        module = model.get_submodule(path)
        weight, pair = cast(nn.Parameter, module._parameters[name]), pair_of(module, name)
        assert pair is not None
        replaced[f"{path}.{name}".lstrip(".")] = weight.detach().clone()
        exact = copy.deepcopy(pair).double().merged_weight(weight.double())
        weight.copy_(exact)
        error = (weight.double() - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        worst = max(worst, float(error))
    return replaced, worst


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


def _check_unshared(model: nn.Module, host: str) -> None:
    path, _, name = host.partition("/")
    weight = model.get_submodule(path)._parameters[name]
    at = [f"{p}.{n}" for p, m in model.named_modules() for n, w in m._parameters.items() if w is weight]
    if len(at) > 1:
        raise UsageError(
            f"the weight of '{path}' is also {' and '.join(at)}: merged, both would change; do not adapt it, or untie it"
        )
