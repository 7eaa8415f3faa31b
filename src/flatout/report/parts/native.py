"""An engine as text: how fast it is from Python and in C, how near its floor, which precision each layer has, how exact it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.core import units
from flatout.core.records.native import NativeLayer, NativeReport
from flatout.report.document import Block, Column, Table, numbers

_MOST_LAYERS = 40
"""More are counted, not listed."""


def native_blocks(report: NativeReport) -> Iterator[Block]:
    """All that is known of an engine; what was not measured is left out or shown as '-'."""
    yield f"{report.hardware}, {report.isa}, {report.compiler}; built in {units.duration(report.build_s)}"
    yield f"weights {units.size(report.weight_bytes)}, state of a stream {units.size(report.state_bytes)}"
    yield from _latencies(report)
    yield from _layers(report.layers)
    if report.errors:
        yield ""
        yield _errors(report)
    for field, why in report.unknown.items():
        yield f"{field}: not known, {why}"


def reached_fraction(report: NativeReport) -> float | None:
    """Floor over the median in C, or from Python where C was not measured: 1 is as fast as the weights can be read."""
    latency = report.native or report.python
    return None if report.floor_s is None or latency is None else report.floor_s / latency.p50_s


def _latencies(report: NativeReport) -> Iterator[Block]:
    rows = [
        [label, *map(units.duration, (latency.p50_s, latency.p99_s, latency.p999_s)), f"{latency.num_events}"]
        for label, latency in (("from Python", report.python), ("in C", report.native))
        if latency is not None
    ]
    if not rows:
        yield "latency: not measured"
    else:
        yield ""
        yield Table([Column("one event"), *numbers("p50", "p99", "p99.9", "events")], rows, inset=0)
    if report.floor_s is not None:
        reached, floor = reached_fraction(report), units.duration(report.floor_s)
        if reached is not None and reached > 1:
            yield f"no floor: reading its weights once takes {floor} at the bandwidth that was measured here, and it is faster"
            return
        tail = "" if reached is None else f"; {units.percent(reached)} of that speed is reached"
        yield f"floor {floor}: its weights, read once from the smallest cache that holds them{tail}"


def _layers(layers: Sequence[NativeLayer]) -> Iterator[Block]:
    if not layers:
        return
    columns = [Column("layer"), *numbers("rows x in -> out", "weights"), Column("precision"), Column("why")]
    shown = len(columns) if any(layer.why for layer in layers) else -1
    rows = []
    for layer in layers[:_MOST_LAYERS]:
        product = f"{layer.rows} x {layer.inputs} -> {layer.outputs}"
        rows.append([layer.name, product, units.size(layer.weight_bytes), layer.precision, layer.why][:shown])
    yield ""
    yield Table(columns[:shown], rows, inset=0)
    if len(layers) > _MOST_LAYERS:
        yield f"and {len(layers) - _MOST_LAYERS} more"


def _errors(report: NativeReport) -> Table:
    rows = []
    for name, error in report.errors.items():
        eager = report.eager_errors.get(name)
        ratio = units.number(error / eager) if eager else units.UNKNOWN
        rows.append([name, f"{error:.1e}", units.UNKNOWN if eager is None else f"{eager:.1e}", ratio])
    return Table([Column("largest error against float64"), *numbers("engine", "eager", "engine/eager")], rows, inset=0)
