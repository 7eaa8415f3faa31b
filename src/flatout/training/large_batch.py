"""LARS and LAMB: optimizers for very large batches, whose step in each layer is in proportion to the layer's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from flatout.errors import UsageError

Given: TypeAlias = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]
Tensors: TypeAlias = tuple[Tensor, ...] | list[Tensor]
_LOW: Final = (torch.float16, torch.bfloat16)


class _Layers(NamedTuple):
    """Tensors of one device and dtype that are treated alike, after as many steps; `states` in the same order."""

    weights: list[Tensor]
    gradients: list[Tensor]
    states: list[dict[str, Any]]
    step: int


class Lars(Optimizer):
    """Momentum with layer-wise rates (You, Gitman and Ginsburg 2017, algorithm 1).

    For a layer w with gradient g and decay d: r = trust * |w| / (|g| + d * |w|), v = momentum * v + lr * r * (g + d * w),
    w = w - v; r is 1 where |w| or |g| is 0. Tensors with at most `plain_dims` dimensions, by default the biases and the scales of
    norms, get r = 1 and no decay; -1 leaves out none. All of it can be set for each group.

    All layers of a device at once (foreach); norms stay on the device, and the host does not wait. Norms of 16-bit weights are
    summed in float32. Raises UsageError for values out of range, and for sparse or complex gradients.
    """

    def __init__(
        self,
        params: Given,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust: float = 1e-3,
        plain_dims: int = 1,
    ) -> None:
        own = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "plain_dims": plain_dims}
        super().__init__(params, own)
        for group in self.param_groups:
            _check(group, at_least_0=("lr", "weight_decay", "trust"), below_1={"momentum": group["momentum"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; returns what the closure does."""
        loss = _called(closure)
        for group in self.param_groups:
            for layers, is_plain in _layers(self, group):
                self._update(group, layers, decay=0.0 if is_plain else group["weight_decay"], is_plain=is_plain)
        return loss

    def _update(self, group: dict[str, Any], layers: _Layers, *, decay: float, is_plain: bool) -> None:
        weights, gradients = layers.weights, layers.gradients
        steps = torch._foreach_add(gradients, weights, alpha=decay) if decay else [g.clone() for g in gradients]
        if not is_plain:
            of_weights, of_gradients = _norms(weights), _norms(gradients)
            ratio = group["trust"] * of_weights / (of_gradients + decay * of_weights)
            _scale(steps, torch.where((of_weights > 0) & (of_gradients > 0), ratio, 1.0))
        _scale_all(steps, group["lr"])
        velocities = _state(layers, "velocity")
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, steps)
        torch._foreach_sub_(weights, velocities)


class Lamb(Optimizer):
    """Adam with layer-wise rates (You et al. 2020, algorithm 2), moments corrected for their start.

    For a layer w with decay d: u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + d * w, w = w - lr * |w| / |u| * u; t
    counts the steps in which it had a gradient. The ratio is 1 where |w| or |u| is 0, and at most `most_ratio` (None: no bound,
    as in the paper's experiments). Tensors with at most `plain_dims` dimensions, by default the biases and the scales of norms,
    get a ratio of 1 and no decay; -1 leaves out none.

    The rest as with `Lars`.
    """

    def __init__(
        self,
        params: Given,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        most_ratio: float | None = None,
        plain_dims: int = 1,
    ) -> None:
        own = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**own, "most_ratio": most_ratio, "plain_dims": plain_dims})
        for group in self.param_groups:
            below_1 = {f"betas[{at}]": beta for at, beta in enumerate(group["betas"])}
            _check(group, at_least_0=("lr", "eps", "weight_decay"), below_1=below_1)
            if group["most_ratio"] is not None and not group["most_ratio"] > 0:
                raise UsageError(f"most_ratio {group['most_ratio']} is not above 0; give a bound, or None for none")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; returns what the closure does."""
        loss = _called(closure)
        for group in self.param_groups:
            for layers, is_plain in _layers(self, group):
                self._update(group, layers, decay=0.0 if is_plain else group["weight_decay"], is_plain=is_plain)
        return loss

    def _update(self, group: dict[str, Any], layers: _Layers, *, decay: float, is_plain: bool) -> None:
        (beta1, beta2), weights, number = group["betas"], layers.weights, layers.step + 1
        first, second = _state(layers, "first"), _state(layers, "second")
        torch._foreach_lerp_(first, layers.gradients, 1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, layers.gradients, layers.gradients, 1 - beta2)
        roots = torch._foreach_div(second, 1 - beta2**number)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(first, 1 - beta1**number)
        torch._foreach_div_(steps, roots)
        if decay:
            torch._foreach_add_(steps, weights, alpha=decay)
        if not is_plain:
            of_weights, of_steps = _norms(weights), _norms(steps)
            ratio = torch.where((of_weights > 0) & (of_steps > 0), of_weights / of_steps, 1.0)
            _scale(steps, ratio if group["most_ratio"] is None else ratio.clamp(max=group["most_ratio"]))
        _scale_all(steps, group["lr"])
        torch._foreach_sub_(weights, steps)
        for state in layers.states:
            state["step"] = number


def _layers(optimizer: Optimizer, group: dict[str, Any]) -> Iterator[tuple[_Layers, bool]]:
    """Layers with a gradient, by device, dtype, and whether they are left out of decay and ratio."""
    found: dict[tuple[object, ...], _Layers] = {}
    for weight in group["params"]:
        gradient = weight.grad
        if gradient is None:
            continue
        if gradient.is_sparse or gradient.is_complex():
            kind = "sparse" if gradient.is_sparse else "complex"
            raise UsageError(
                f"a gradient of shape {tuple(gradient.shape)} is {kind}; layer-wise rates are for dense real ones"
            )
        is_plain = weight.dim() <= group["plain_dims"]
        step = optimizer.state[weight].get("step", 0)
        layers = found.setdefault((weight.device, weight.dtype, is_plain, step), _Layers([], [], [], step))
        layers.weights.append(weight)
        layers.gradients.append(gradient)
        layers.states.append(optimizer.state[weight])
    for key, layers in found.items():
        yield layers, bool(key[2])


def _norms(tensors: Tensors) -> Tensor:
    """Of each tensor, in a vector on their device."""
    dtype = torch.float32 if tensors[0].dtype in _LOW else None
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))


def _scale(tensors: Tensors, by: Tensor) -> None:
    torch._foreach_mul_(tensors, list(by.to(tensors[0].dtype).unbind()))


def _scale_all(tensors: Tensors, rate: float | Tensor) -> None:
    """By a number, or by one in a tensor (see `training.schedules.set_rate`), without a wait."""
    torch._foreach_mul_(tensors, rate)


def _state(layers: _Layers, name: str) -> list[Tensor]:
    for weight, state in zip(layers.weights, layers.states, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(weight, memory_format=torch.preserve_format)
    return [state[name] for state in layers.states]


def _called(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check(group: dict[str, Any], *, at_least_0: Iterable[str], below_1: dict[str, float]) -> None:
    values = {name: group[name] for name in at_least_0}
    wrong = [f"{name} {value}" for name, value in values.items() if not value >= 0]
    wrong += [f"{name} {value}" for name, value in below_1.items() if not 0 <= value < 1]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)}: give {', '.join(values)} of 0 or more, and {', '.join(below_1)} from 0 to below 1"
        )
