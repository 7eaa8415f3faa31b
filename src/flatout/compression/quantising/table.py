"""A report of what was chosen as text."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.records.quantising import LayerChoice, QuantisingReport, SchemeTrial


def table(report: QuantisingReport) -> str:
    """What the whole model gained and paid, then each layer with each scheme that was tried on it."""
    times = f"{_time(report.before_s)} -> {_time(report.after_s)}"
    ratio = (
        f"{report.ratio:.3f} [{report.ratio_low:.3f}, {report.ratio_high:.3f}] of the time, {report.num_rounds} rounds"
    )
    lines = [
        f"whole model: {times}, {ratio}; {report.device}, {report.num_threads} threads, torch {report.torch}",
        f"{report.measure}: lost {report.cost:.3g} (before {report.cost_before:.2g}), {report.budget:.3g} may be; "
        f"weights {report.weight_bytes_before / 2**20:.2f} -> {report.weight_bytes_after / 2**20:.2f} MiB",
        "",
    ]
    rows: list[tuple[str, ...]] = [("layer", "scheme", "time", "of before", "layer error", "model loses", "")]
    for layer in report.layers:
        rows += [_head(layer), *(_row(layer, trial) for trial in layer.trials)]
    lines += _aligned(rows)
    lines += [f"given back: {told}" for told in report.backed_off]
    return "\n".join(lines)


def _head(layer: LayerChoice) -> tuple[str, ...]:
    name = f"{layer.path or '(model)'}: {layer.kind}" + (f" x{layer.num_calls}" if layer.num_calls > 1 else "")
    return name, layer.scheme or "as it was", _time(layer.call_s), "", "", "", layer.why


def _row(layer: LayerChoice, trial: SchemeTrial) -> tuple[str, ...]:
    ratio = "" if trial.ratio is None else f"{trial.ratio:.2f} [{trial.ratio_low:.2f}, {trial.ratio_high:.2f}]"
    error = "" if trial.layer_error is None else f"{trial.layer_error:.2g}"
    cost = "" if trial.cost is None else f"{trial.cost:.2g}"
    return (
        "",
        trial.scheme,
        _time(trial.call_s),
        ratio,
        error,
        cost,
        "taken" if trial.scheme == layer.scheme else trial.why,
    )


def _time(seconds: float | None) -> str:
    """Microseconds below a millisecond.

    >>> _time(0.00025), _time(0.0123), _time(None)
    ('250.0 us', '12.30 ms', '')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
