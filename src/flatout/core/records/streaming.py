"""Weights that do not all fit the device: what was predicted of a pass, and what was measured."""

from __future__ import annotations

from flatout.core.records.record import Record


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
