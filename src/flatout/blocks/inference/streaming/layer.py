"""One layer that is streamed: where its weights are, and what is its `forward` meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from flatout.blocks.inference.streaming.sources import host_memory, read_file_into
from flatout.blocks.inference.streaming.transit import Arrival, TransitPlan, as_is
from flatout.blocks.streaming.weight_stream import StreamedModule, check_streamable
from flatout.core.errors import UsageError

Bring: TypeAlias = "Callable[[StreamedLayer], AbstractContextManager[dict[str, nn.Parameter]]]"
"""What brings a layer's weights, which may be used inside."""


def check_layers(layers: Sequence[nn.Module]) -> None:
    """Raises UsageError where a layer's weights could not be taken away."""
    check_streamable(layers, "layer")
    weights: dict[int, str] = {}
    for at, layer in enumerate(layers):
        for path, weight in layer.named_parameters():
            name = f"layer {at}, '{path}'"
            if weights.setdefault(id(weight), name) != name:
                raise UsageError(f"{name} is {weights[id(weight)]} too; give layers that share no weight")


class StreamedLayer(StreamedModule):
    """A layer, and what is its `forward` while it is streamed."""

    def __init__(
        self, number: int, module: nn.Module, plan: TransitPlan, *, device: torch.device, bring: Bring
    ) -> None:
        super().__init__(module, device)
        self.number, self.plan, self.order = number, plan, -1
        self.arrivals: list[Arrival] = []
        self._device, self._bring = device, bring
        self._homes = {name: weight.device for name, weight in self.weights.items()}
        self._file: Path | None = None
        self._packed_at: list[int] | None = None

    @property
    def is_streamed(self) -> bool:
        return self.order >= 0

    def stay(self) -> None:
        """Move the weights to the device, where they stay unchanged."""
        with torch.no_grad():
            for weight in self.weights.values():
                weight.data = weight.data.to(self._device)

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
        is_copy = file is not None or any(part.bits is not None for part in self.plan.parts)
        self._packed_at = self.versions() if is_copy else None
        self.replace_forward()

    def undo(self) -> None:
        """The module as it was."""
        self.restore()
        if self._file is not None and any(part.bits is None for part in self.plan.parts):
            stretch = host_memory(self.plan.sent_bytes)
            read_file_into(stretch, self._file)
            for part in self.plan.parts:
                if part.bits is None:
                    self.weights[part.name].data = as_is(part, stretch)
        for name, weight in self.weights.items():
            weight.data = weight.data.to(self._homes[name])

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
        with self._bring(self) as weights:
            return self.compute(weights, args, kwargs)

    def compute(self, weights: dict[str, nn.Parameter], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's own forward, with these weights in it meanwhile."""
        self.put_in(weights.values())
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.take_out()
