"""One layer that is streamed: where its weights are, and what is its `forward` meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.inference.streaming.sources import host_memory, read_into
from flatout.inference.streaming.transit import Arrival, Plan, Transit, as_is


class Ring(Protocol):
    """What brings a layer's weights."""

    device: torch.device
    transit: Transit

    def enter(self, layer: Layer) -> dict[str, nn.Parameter]: ...

    def leave(self, layer: Layer) -> None: ...


def check(layers: Sequence[nn.Module]) -> None:
    """Raises UsageError where a layer's weights could not be taken away."""
    modules: dict[int, str] = {}
    weights: dict[int, str] = {}
    for at, layer in enumerate(layers):
        mine: set[int] = set()
        for path, module in layer.named_modules():
            name = f"layer {at}" + (f", '{path}'" if path else "")
            if id(module) in modules:
                raise UsageError(f"{name} is {modules[id(module)]} too; give layers that share no module")
            mine.add(id(module))
            if isinstance(module, nn.RNNBase):
                raise UsageError(
                    f"{name} is a {type(module).__name__}, which keeps weights in a list of its own; leave it out"
                )
            if isinstance(vars(module).get("forward"), Layer):
                raise UsageError(f"{name} is streamed already; undo that first")
            if any(type(p) is not nn.Parameter or p.is_meta for p in module.parameters(recurse=False)):
                raise UsageError(
                    f"{name} has parameters that are DTensors, meta or otherwise no plain ones; leave it out"
                )
        for path, weight in layer.named_parameters():
            name = f"layer {at}, '{path}'"
            if weights.setdefault(id(weight), name) != name:
                raise UsageError(f"{name} is {weights[id(weight)]} too; give layers that share no weight")
        modules.update(dict.fromkeys(mine, f"in layer {at}"))


class Layer:
    """A layer, and what is its `forward` while it is streamed."""

    def __init__(self, over: Ring, number: int, module: nn.Module, plan: Plan) -> None:
        self.number, self.module, self.plan, self.order = number, module, plan, -1
        self.arrivals: list[Arrival] = []
        self.weights = dict(module.named_parameters())
        self._over, self._own_forward = over, vars(module).get("forward")
        self.forward: Callable[..., Any] = module.forward
        self._sites: list[tuple[nn.Module, str, str]] = []
        names = {id(weight): name for name, weight in self.weights.items()}
        for inner in module.modules():
            for name, weight in inner._parameters.items():
                if weight is not None:
                    self._sites.append((inner, name, names[id(weight)]))
        self._homes = {name: weight.device for name, weight in self.weights.items()}
        self._buffers = [(m, n, b.device) for m in module.modules() for n, b in m._buffers.items() if b is not None]
        self._file: Path | None = None
        self._packed_at: list[int] | None = None
        for inner, name, _ in self._buffers:
            inner._buffers[name] = inner._buffers[name].to(over.device)  # type: ignore[union-attr]

    @property
    def is_streamed(self) -> bool:
        return self.order >= 0

    def stay(self) -> None:
        """On the device, as it is."""
        with torch.no_grad():
            for weight in self.weights.values():
                weight.data = weight.data.to(self._over.device)

    def leave(self, stretch: Tensor | None, file: Path | None) -> None:
        """Off the device: weights that travel as they are have their numbers in the stretch, or in the file alone."""
        for part in self.plan.parts:
            weight = self.weights[part.name]
            if part.bits is not None:
                weight.data = weight.data.to("cpu")
            elif stretch is not None:
                weight.data = as_is(part, stretch)
            else:
                weight.data = weight.data.new_empty(0, device="cpu")
        self._file = file
        self._packed_at = self.versions() if self._over.transit != "as-is" or file is not None else None
        self.module.forward = self

    def versions(self) -> list[int]:
        """torch's counts of changes in place."""
        return [weight._version for weight in self.weights.values()]

    def undo(self) -> None:
        """The module as it was."""
        if isinstance(vars(self.module).get("forward"), Layer):
            del self.module.forward
            if self._own_forward is not None:
                self.module.forward = self._own_forward
        if self._file is not None and any(part.bits is None for part in self.plan.parts):
            stretch = host_memory(self.plan.sent_bytes)
            read_into(stretch, self._file)
            for part in self.plan.parts:
                if part.bits is None:
                    self.weights[part.name].data = as_is(part, stretch)
        for name, weight in self.weights.items():
            weight.data = weight.data.to(self._homes[name])
        for inner, name, home in self._buffers:
            inner._buffers[name] = inner._buffers[name].to(home)  # type: ignore[union-attr]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                f"layer {self.number} is streamed for inference and would record gradients; call it in torch.no_grad() "
                "or torch.inference_mode()"
            )
        if self._packed_at is not None and self._packed_at != self.versions():
            raise UsageError(
                f"weights of layer {self.number} have changed since they were packed or written; stream anew"
            )
        weights = self._over.enter(self)
        try:
            return self.compute(weights, args, kwargs)
        finally:
            self._over.leave(self)

    def compute(self, weights: dict[str, nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, with these weights in it meanwhile."""
        for inner, name, whole in self._sites:
            inner._parameters[name] = weights[whole]
        try:
            return self.forward(*args, **kwargs)
        finally:
            for inner, name, whole in self._sites:
                inner._parameters[name] = self.weights[whole]
