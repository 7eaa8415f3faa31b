"""How long a pass will take, from parts that are measured alone; and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from flatout.errors import UsageError
from flatout.inference.streaming.layer import Layer
from flatout.inference.streaming.placing import Timed, pass_s
from flatout.inference.streaming.transit import Transit
from flatout.measure.timer import HostClock, clock_for, time_call
from flatout.records.streaming import PassMeasurement, PassPrediction

_MOST_SENDS = 8
"""Layers that are sent to measure the link, at most."""

_CALLS = 3
"""Calls that are timed as one: a single call's time holds the wait until the device begins."""


class Passes(Protocol):
    """What is predicted: see `StreamedLayers`."""

    layers: list[Layer]
    streamed: tuple[int, ...]
    device: torch.device
    transit: Transit
    slots: int
    device_bytes: int
    sent_bytes: int
    prediction: PassPrediction | None

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any: ...

    def alone(self) -> AbstractContextManager[Callable[[Sequence[int]], None]]: ...


def predicted(
    streamed: Passes, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, seconds: float
) -> PassPrediction:
    """See `StreamedLayers.predict`. One pass to begin with, which also shows each kind of layer its inputs."""
    if not streamed.layers:
        raise UsageError("these layers are no longer streamed; stream them anew")
    inputs: dict[tuple[object, ...], Any] = {}
    kinds = [_kind(layer) for layer in streamed.layers]
    with torch.no_grad():
        for layer, kind in zip(streamed.layers, kinds, strict=True):
            inputs.setdefault(kind, x)
            x = layer.module(x, *args, **kwargs)
        rate = _link_bytes_per_s(streamed, seconds / 2)
        share_s = seconds / 2 / len(inputs)
        computing = {
            kind: _compute_s(streamed, streamed.layers[kinds.index(kind)], (inputs[kind], *args), kwargs, share_s)
            for kind in inputs
        }
    timed = [
        Timed(
            computing[kind],
            layer.plan.sent_bytes / rate if layer.is_streamed and rate else None,
            bool(layer.plan.expanded_bytes),
        )
        for layer, kind in zip(streamed.layers, kinds, strict=True)
    ]
    compute_s = sum(layer.compute_s for layer in timed)
    copy_s = sum(layer.send_s or 0.0 for layer in timed)
    # On a CPU copies are the processor's work, too. A sum in another order may be a rounding less than the bound.
    overlapped_s = max(pass_s(timed, slots=streamed.slots), copy_s, compute_s)
    whole_s = copy_s + compute_s if streamed.device.type == "cpu" else overlapped_s
    return PassPrediction(
        num_layers=len(timed),
        num_resident=len(timed) - len(streamed.streamed),
        transit=streamed.transit,
        device_bytes=streamed.device_bytes,
        sent_bytes=streamed.sent_bytes,
        link_bytes_per_s=rate,
        copy_s=copy_s,
        compute_s=compute_s,
        bound_s=max(copy_s, compute_s),
        pass_s=whole_s,
        exposed_s=whole_s - max(copy_s, compute_s),
    )


def measured(
    streamed: Passes, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, seconds: float
) -> PassMeasurement:
    """See `StreamedLayers.measured`."""
    if not streamed.layers:
        raise UsageError("these layers are no longer streamed; stream them anew")
    timing = time_call(
        lambda: streamed(x, *args, **kwargs),
        device=streamed.device,
        min_time_s=seconds / 2,
        max_time_s=seconds,
        warmup=1,
    )
    found, before = timing.call_s, streamed.prediction
    return PassMeasurement(
        pass_s=found.value,
        low_s=found.low,
        high_s=found.high,
        num_passes=found.num_samples,
        bound_fraction=None if before is None else before.bound_s / found.value,
        error_fraction=None if before is None else found.value / before.pass_s - 1,
    )


def _kind(layer: Layer) -> tuple[object, ...]:
    """Layers of a kind take the same time."""
    weights = tuple((tuple(part.shape), part.dtype, part.bits) for part in layer.plan.parts)
    return type(layer.module), weights, layer.is_streamed


def _link_bytes_per_s(streamed: Passes, seconds: float) -> float:
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


def _compute_s(streamed: Passes, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> float:
    """Of a layer with the weights that happen to be in the ring; what is there does not change the time."""
    if not layer.is_streamed:
        return _seconds(streamed, lambda: layer.module(*args, **kwargs), seconds)
    arrival = layer.arrivals[0]

    def compute() -> None:
        arrival.expand()
        layer.compute(arrival.weights, args, kwargs)

    return _seconds(streamed, compute, seconds)


def _seconds(streamed: Passes, call: Any, seconds: float) -> float:
    def calls() -> None:
        for _ in range(_CALLS):
            call()

    clock = clock_for(streamed.device)
    return time_call(calls, clock=clock, min_time_s=seconds / 2, max_time_s=seconds, warmup=1).call_s.value / _CALLS
