"""A small model as native code: what goes in and out of it, its state, and its measured speed and error."""

from __future__ import annotations

import re
from math import prod
from typing import Final

from flatout.core.records.record import Record

DTYPE_BYTES: Final = {"float32": 4, "int32": 4, "int64": 8, "bool": 1}
"""Bytes of one number of the dtypes that an engine takes."""
NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,40}\Z")
"""A model's name: part of names in C and of files."""


class Port(Record, frozen=True, kw_only=True):
    """An input, an output or a carried state of one event, its numbers one after the other in C order."""

    name: str
    dtype: str
    """As torch names it: "float32", "int64", "bool"."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one event's numbers."""
        return prod(self.shape, start=DTYPE_BYTES[self.dtype])


class NativeLayer(Record, frozen=True, kw_only=True):
    """A product of the model with one of its weights."""

    name: str
    """The parameter, as the state dict names it."""
    rows: int
    """Vectors multiplied in one event."""
    inputs: int
    outputs: int
    weight_bytes: int
    precision: str = "float32"
    why: str = ""
    """Why this precision."""


class Latency(Record, frozen=True, kw_only=True):
    """Percentiles of the time of one event."""

    p50_s: float
    p99_s: float
    p999_s: float
    num_events: int


class NativeReport(Record, frozen=True, kw_only=True):
    """What was measured of an engine on the machine that built it."""

    hardware: str
    isa: str
    compiler: str
    build_s: float
    layers: tuple[NativeLayer, ...]
    weight_bytes: int
    state_bytes: int
    floor_s: float | None = None
    """Weight bytes over the measured bandwidth of the smallest cache that holds them."""
    python: Latency | None = None
    """Latency of `Engine.step` with a buffer for the output."""
    native: Latency | None = None
    """Latency of the same in a loop in C."""
    errors: dict[str, float] = {}
    """Largest error relative to the largest number of the output, against float64, by name of the output, over a rollout."""
    eager_errors: dict[str, float] = {}
    """The same errors of the original model in eager mode, float32."""
    unknown: dict[str, str] = {}
    """Why a field could not be measured, by its name."""


class NativeManifest(Record, frozen=True, kw_only=True):
    """What an engine's folder holds: `engine.json`."""

    name: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    state: tuple[Port, ...]
    """In the order of a snapshot, each beginning at a multiple of 8 bytes."""
    isas: tuple[str, ...]
    """That the library holds code for, best first."""
    weights_bytes: int
    weights_sum: str
    """SHA-256 of the packed weights."""
    torch: str
    flatout: str
    precision: dict[str, str] = {}
    """Of parameters whose products are coarser than float32, by their name: other weights are packed the same way."""
    sums: dict[str, str] = {}
    """SHA-256 of the library and of the program, by name of file; empty before the engine is saved."""
