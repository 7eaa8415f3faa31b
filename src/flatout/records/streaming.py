"""Weights that do not all fit the device, and tokens one at a time: what was predicted, and what was measured."""

from __future__ import annotations

from flatout.records.record import Record


class PassPrediction(Record, frozen=True, kw_only=True):
    """Seconds of one pass through streamed layers, of passes one after the other, from parts that were measured alone."""

    num_layers: int
    num_resident: int
    transit: str
    device_bytes: int
    """Weights that stay on the device, the ring, and the room to expand into."""
    sent_bytes: int
    """Of one pass, over the link."""
    link_bytes_per_s: float
    copy_s: float
    """`sent_bytes` over the link's rate."""
    compute_s: float
    """Of all layers, expanding included, with weights that are there."""
    bound_s: float
    """The larger of the two: no order of copies is faster."""
    pass_s: float
    """With the ring's depth and the order of layers."""
    exposed_s: float
    """What cannot overlap: `pass_s` less `bound_s`."""


class PassMeasurement(Record, frozen=True, kw_only=True):
    """Seconds of one pass, as they were."""

    pass_s: float
    low_s: float
    high_s: float
    num_passes: int
    bound_fraction: float | None = None
    """Of the prediction's bound; 1 where nothing is lost. None without a prediction."""
    error_fraction: float | None = None
    """Measured over predicted, less 1."""


class DecodeRate(Record, frozen=True, kw_only=True):
    """Tokens one at a time, beside what reading their bytes alone would take."""

    tokens_per_s: float
    """Of all sequences of the batch together."""
    step_s: float
    weight_bytes: int
    cache_bytes: int
    """Of keys and values that a step reads."""
    bandwidth_bytes_per_s: float
    """Of a copy on the device, read plus write."""
    bound_s: float
    bound_fraction: float
    """`bound_s` over `step_s`: 1 at the speed of memory."""
