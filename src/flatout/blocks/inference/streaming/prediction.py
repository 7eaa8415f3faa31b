"""How long a pass will take and how long it takes: the records, and the parts that are measured alone."""

from __future__ import annotations

from typing import Any, Final

import torch

from flatout.blocks.inference.streaming.layer import StreamedLayer
from flatout.core.records.record import Record
from flatout.machine.measure.timer import time_call

_CALLS: Final = 3
"""Calls that are timed as one: a single call's time holds the wait until the device begins."""


class PassPrediction(Record, frozen=True, kw_only=True):
    """Seconds of one pass through streamed layers, of passes one after the other, from parts that were measured alone."""

    num_layers: int
    num_resident: int
    transit: str
    device_bytes: int
    """Weights that stay on the device, the ring, and the room to expand into."""
    sent_bytes: int
    """Bytes of one pass that go over the link."""
    link_bytes_per_s: float
    copy_s: float
    """`sent_bytes` over the link's rate."""
    compute_s: float
    """Seconds to compute all layers, expanding included, with weights already on the device."""
    bound_s: float
    """The larger of the two: no order of copies is faster."""
    pass_s: float
    """Predicted seconds of a pass, with the ring's depth and the order of layers."""
    exposed_s: float
    """What cannot overlap: `pass_s` less `bound_s`."""


class PassMeasurement(Record, frozen=True, kw_only=True):
    """Measured seconds of one pass through streamed layers, with an interval."""

    pass_s: float
    low_s: float
    high_s: float
    num_passes: int
    bound_fraction: float | None = None
    """The predicted bound over the measured time; 1 where nothing is lost. None without a prediction."""
    error_fraction: float | None = None
    """Measured over predicted, less 1."""


def kind_of(layer: StreamedLayer) -> tuple[object, ...]:
    """What layers have in common that take the same time."""
    weights = tuple((tuple(part.shape), part.dtype, part.bits) for part in layer.plan.parts)
    return type(layer.module), weights, layer.is_streamed


def compute_s(
    layer: StreamedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], *, device: torch.device, max_time_s: float
) -> float:
    """Seconds of a layer with the weights that happen to be in the ring; what is there does not change the time."""

    def calls() -> None:
        for _ in range(_CALLS):
            if layer.is_streamed:
                layer.arrivals[0].expand()
                layer.compute(layer.arrivals[0].weights, args, kwargs)
            else:
                layer.module(*args, **kwargs)

    timing = time_call(calls, device=device, min_time_s=max_time_s / 2, max_time_s=max_time_s, warmup=1)
    return timing.call_s.value / _CALLS
