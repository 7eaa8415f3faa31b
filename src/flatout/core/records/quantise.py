"""Layers of a model that got fewer bits: what was tried, how long it took, what it cost, and why it was or was not taken."""

from __future__ import annotations

from flatout.core.records.record import Record


class SchemeTrial(Record, frozen=True, kw_only=True):
    """One scheme on one layer. Numbers are None where the trial ended before they were measured; `why` says where."""

    scheme: str
    call_s: float | None = None
    """Of all calls of the layer in one call of the model."""
    ratio: float | None = None
    """Time over that of the layer as it was, measured in the same rounds; the ends of its interval follow."""
    ratio_low: float | None = None
    ratio_high: float | None = None
    layer_error: float | None = None
    """Of the layer's outputs against float64, relative: norm of the difference over norm."""
    cost: float | None = None
    """What the whole model loses with this layer alone in this scheme, in the report's measure."""
    why: str


class LayerOutcome(Record, frozen=True, kw_only=True):
    """One layer: all that was tried on it, and what it became."""

    path: str
    kind: str
    """Its type and sizes."""
    num_calls: int
    """In one call of the model."""
    call_s: float | None = None
    """As it was: of all its calls in one call of the model."""
    trials: tuple[SchemeTrial, ...] = ()
    scheme: str | None = None
    """None: it stays as it was."""
    why: str


class QuantisingReport(Record, frozen=True, kw_only=True):
    """A model before and after: measured as a whole, at the end."""

    device: str
    num_threads: int
    torch: str
    measure: str
    """Of what it costs: "metric" (how far it fell) or "output error" (relative, against float64)."""
    budget: float
    cost: float
    """At the end, in the whole model."""
    cost_before: float
    """Of the model as it was: 0 for a metric, its own rounding for the output error."""
    before_s: float
    after_s: float
    ratio: float
    """Time after over time before, paired by round; 1 with an interval of nothing when nothing was taken."""
    ratio_low: float
    ratio_high: float
    num_rounds: int
    weight_bytes_before: int
    weight_bytes_after: int
    layers: tuple[LayerOutcome, ...]
    backed_off: tuple[str, ...] = ()
    """What was taken at first and given back, and why, in order."""
