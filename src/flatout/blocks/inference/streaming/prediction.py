"""How long a pass will take, from parts that are measured alone; and how long it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from flatout.blocks.inference.streaming.layer import StreamedLayer
from flatout.blocks.inference.streaming.placement import Timed, pass_s
from flatout.blocks.inference.streaming.transit import Transit
from flatout.core.errors import UsageError
from flatout.core.records.streaming import PassMeasurement, PassPrediction
from flatout.machine.measure.timer import HostClock, clock_for, time_call

_MOST_SENDS = 8
"""Layers that are sent to measure the link, at most."""

_CALLS = 3
"""Calls that are timed as one: a single call's time holds the wait until the device begins."""


class PredictedPasses(ABC):
    """Layers through which passes are predicted, from parts that are measured alone, and measured."""

    layers: list[StreamedLayer]
    streamed: tuple[int, ...]
    device: torch.device
    transit: Transit
    num_buffers: int
    device_bytes: int
    sent_bytes: int
    prediction: PassPrediction | None

    @abstractmethod
    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def alone(self) -> AbstractContextManager[Callable[[Sequence[int]], None]]: ...

    def predict(self, x: Any, *args: Any, seconds: float = 2.0, **kwargs: Any) -> PassPrediction:
        """What a pass on these inputs will take, from the link and one layer of each kind, measured alone. Also `prediction`.

        One pass runs first, which also records the inputs of each kind of layer.
        """
        if not self.layers:
            raise UsageError("these layers are no longer streamed; stream them anew")
        inputs: dict[tuple[object, ...], Any] = {}
        kinds = [_kind(layer) for layer in self.layers]
        with torch.no_grad():
            for layer, kind in zip(self.layers, kinds, strict=True):
                inputs.setdefault(kind, x)
                x = layer.module(x, *args, **kwargs)
            rate = _link_bytes_per_s(self, seconds / 2)
            share_s = seconds / 2 / len(inputs)
            computing = {
                kind: _compute_s(self, self.layers[kinds.index(kind)], (inputs[kind], *args), kwargs, share_s)
                for kind in inputs
            }
        timed = [
            Timed(
                computing[kind],
                layer.plan.sent_bytes / rate if layer.is_streamed and rate else None,
                bool(layer.plan.expanded_bytes),
            )
            for layer, kind in zip(self.layers, kinds, strict=True)
        ]
        compute_s = sum(layer.compute_s for layer in timed)
        copy_s = sum(layer.send_s or 0.0 for layer in timed)
        # On a CPU copies are the processor's work, too. A sum in another order may be a rounding less than the bound.
        overlapped_s = max(pass_s(timed, num_buffers=self.num_buffers), copy_s, compute_s)
        whole_s = copy_s + compute_s if self.device.type == "cpu" else overlapped_s
        self.prediction = PassPrediction(
            num_layers=len(timed),
            num_resident=len(timed) - len(self.streamed),
            transit=self.transit,
            device_bytes=self.device_bytes,
            sent_bytes=self.sent_bytes,
            link_bytes_per_s=rate,
            copy_s=copy_s,
            compute_s=compute_s,
            bound_s=max(copy_s, compute_s),
            pass_s=whole_s,
            exposed_s=whole_s - max(copy_s, compute_s),
        )
        return self.prediction

    def measured(self, x: Any, *args: Any, seconds: float = 5.0, **kwargs: Any) -> PassMeasurement:
        """What a pass takes, of passes one after the other, beside the prediction if there is one."""
        if not self.layers:
            raise UsageError("these layers are no longer streamed; stream them anew")
        timing = time_call(
            lambda: self(x, *args, **kwargs),
            device=self.device,
            min_time_s=seconds / 2,
            max_time_s=seconds,
            warmup=1,
        )
        found, before = timing.call_s, self.prediction
        return PassMeasurement(
            pass_s=found.value,
            low_s=found.low,
            high_s=found.high,
            num_passes=found.num_samples,
            bound_fraction=None if before is None else before.bound_s / found.value,
            error_fraction=None if before is None else found.value / before.pass_s - 1,
        )


def _kind(layer: StreamedLayer) -> tuple[object, ...]:
    """Layers of a kind take the same time."""
    weights = tuple((tuple(part.shape), part.dtype, part.bits) for part in layer.plan.parts)
    return type(layer.module), weights, layer.is_streamed


def _link_bytes_per_s(streamed: PredictedPasses, seconds: float) -> float:
    """Of sending some layers one after the other with nothing else to do; 0 where nothing is sent."""
    with streamed.alone() as send:
        numbers = range(min(_MOST_SENDS, len(streamed.streamed)))
        if not numbers:
            return 0.0
        num_bytes = sum(streamed.layers[streamed.streamed[i]].plan.sent_bytes for i in numbers)
        timing = time_call(
            lambda: send(numbers), clock=HostClock(), min_time_s=seconds / 4, max_time_s=seconds, warmup=1
        )
        return num_bytes / timing.call_s.value


def _compute_s(
    streamed: PredictedPasses, layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> float:
    """Of a layer with the weights that happen to be in the ring; what is there does not change the time."""
    if not layer.is_streamed:
        return _seconds(streamed, lambda: layer.module(*args, **kwargs), seconds)
    arrival = layer.arrivals[0]

    def compute() -> None:
        arrival.expand()
        layer.compute(arrival.weights, args, kwargs)

    return _seconds(streamed, compute, seconds)


def _seconds(streamed: PredictedPasses, call: Any, seconds: float) -> float:
    def calls() -> None:
        for _ in range(_CALLS):
            call()

    clock = clock_for(streamed.device)
    return time_call(calls, clock=clock, min_time_s=seconds / 2, max_time_s=seconds, warmup=1).call_s.value / _CALLS
