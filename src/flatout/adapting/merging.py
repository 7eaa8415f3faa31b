"""Low-rank pairs written into the weights: summed in float64, rounded once, what was there kept."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from flatout.adapting.low_rank import pair_of
from flatout.errors import UsageError


@torch.no_grad()
def merge_weights(model: nn.Module, hosts: Sequence[str]) -> tuple[dict[str, Tensor], float]:
    """What the weights were, by name, and the largest rounding error over a weight's largest number.

    Raises UsageError, before it changes anything, where a weight is shared with another module: that would change, too.
    """
    for host in hosts:
        _check_unshared(model, host)
    kept, worst = {}, 0.0
    for host in hosts:
        path, _, name = host.partition("/")
        module = model.get_submodule(path)
        weight, pair = cast(nn.Parameter, module._parameters[name]), pair_of(module, name)
        assert pair is not None
        kept[f"{path}.{name}".lstrip(".")] = weight.detach().clone()
        exact = copy.deepcopy(pair).double().formed(weight.double())
        weight.copy_(exact)
        error = (weight.double() - exact).abs().max() / exact.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
        worst = max(worst, float(error))
    return kept, worst


@torch.no_grad()
def measured_error(
    model: nn.Module, inputs: Sequence[Any], *, exact: list[Tensor] | None = None
) -> tuple[list[Tensor], float]:
    """The outputs of the model in float64 (or those given), and how far its own are from them, over their largest number.

    Both in eval mode; the mode of every module is put back.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if exact is None:
            exact = list(_floats(copy.deepcopy(model).double()(*tree_map(_to_double, tuple(inputs)))))
        outputs = list(_floats(model(*inputs)))
    finally:
        for module, mode in modes:
            module.training = mode
    scale = max((float(e.abs().max()) for e in exact), default=0.0)
    distance = max((float((o.double() - e).abs().max()) for o, e in zip(outputs, exact, strict=True)), default=0.0)
    return exact, distance / scale if scale else distance


def _check_unshared(model: nn.Module, host: str) -> None:
    path, _, name = host.partition("/")
    weight = model.get_submodule(path)._parameters[name]
    at = [f"{p}.{n}" for p, m in model.named_modules() for n, w in m._parameters.items() if w is weight]
    if len(at) > 1:
        raise UsageError(
            f"the weight of '{path}' is also {' and '.join(at)}: merged, both would change; do not adapt it, or untie it"
        )


def _floats(tree: object) -> Iterator[Tensor]:
    yield from (t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point())


def _to_double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
