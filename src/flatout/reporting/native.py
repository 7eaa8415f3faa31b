"""An engine as text: how fast it is from Python and in C, how near its floor, which precision each layer has, how exact it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.records.native import Latency, NativeLayer, NativeReport
from flatout.reporting import units

_MOST_LAYERS = 40
"""More are counted, not listed."""


def native_lines(report: NativeReport) -> Iterator[str]:
    """All that is known of an engine; what was not measured is left out or shown as '-'."""
    yield f"{report.hardware}, {report.isa}, {report.compiler}; built in {units.duration(report.build_s)}"
    yield f"weights {units.size(report.weight_bytes)}, state of a stream {units.size(report.state_bytes)}"
    yield from _latency_lines(report)
    yield from _layer_lines(report.layers)
    yield from _error_lines(report)
    for field, why in report.unknown.items():
        yield f"{field}: not known, {why}"


def native_text(report: NativeReport) -> str:
    """The same as one text."""
    return "\n".join(native_lines(report))


def reached_fraction(report: NativeReport) -> float | None:
    """Floor over the median in C, or from Python where C was not measured: 1 is as fast as the weights can be read."""
    latency = report.native or report.python
    return None if report.floor_s is None or latency is None else report.floor_s / latency.p50_s


def _latency_lines(report: NativeReport) -> Iterator[str]:
    rows = [
        _latency_row(label, latency)
        for label, latency in (("from Python", report.python), ("in C", report.native))
        if latency is not None
    ]
    if not rows:
        yield "latency: not measured"
    else:
        yield ""
        yield from _table(("one event", "p50", "p99", "p99.9", "events"), rows)
    if report.floor_s is not None:
        reached = reached_fraction(report)
        tail = "" if reached is None else f"; {units.percent(reached)} of that speed is reached"
        yield f"floor {units.duration(report.floor_s)}: its weights, read once from the smallest cache that holds them{tail}"


def _latency_row(label: str, latency: Latency) -> tuple[str, ...]:
    times = (latency.p50_s, latency.p99_s, latency.p999_s)
    return (label, *(units.duration(seconds) for seconds in times), f"{latency.num_events}")


def _layer_lines(layers: Sequence[NativeLayer]) -> Iterator[str]:
    if not layers:
        return
    yield ""
    rows = [
        (
            layer.name,
            f"{layer.rows} x {layer.inputs} -> {layer.outputs}",
            units.size(layer.weight_bytes),
            layer.precision,
            layer.why,
        )
        for layer in layers[:_MOST_LAYERS]
    ]
    yield from _table(("layer", "rows x in -> out", "weights", "precision", "why"), rows, left=(0, 3, 4))
    if len(layers) > _MOST_LAYERS:
        yield f"and {len(layers) - _MOST_LAYERS} more"


def _error_lines(report: NativeReport) -> Iterator[str]:
    if not report.errors:
        return
    yield ""
    rows = [
        (name, _error(error), _error(report.eager_errors.get(name)), _times(error, report.eager_errors.get(name)))
        for name, error in report.errors.items()
    ]
    yield from _table(("largest error against float64", "engine", "eager", "engine/eager"), rows)


def _error(error: float | None) -> str:
    return units.UNKNOWN if error is None else f"{error:.1e}"


def _times(error: float, eager: float | None) -> str:
    return units.UNKNOWN if not eager else units.number(error / eager)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> Iterator[str]:
    """Columns under their heads, numbers to the right; a column that is empty throughout is left out."""
    shown = [at for at in range(len(head)) if any(row[at] for row in rows)]
    widths = {at: max(len(cells[at]) for cells in (head, *rows)) for at in shown}
    for cells in (head, *rows):
        line = [cells[at].ljust(widths[at]) if at in left else cells[at].rjust(widths[at]) for at in shown]
        yield "  ".join(line).rstrip()
