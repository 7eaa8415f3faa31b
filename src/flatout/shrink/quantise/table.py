"""A report of quantisation as text."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.core.records.quantise import LayerOutcome, QuantisingReport, SchemeTrial
from flatout.core.units import duration


def report_table(report: QuantisingReport) -> str:
    """What the whole model gained and paid, then each layer with each scheme that was tried on it."""
    times = f"{duration(report.before_s)} -> {duration(report.after_s)}"
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
    lines += [f"reverted: {message}" for message in report.backed_off]
    return "\n".join(lines)


def _head(layer: LayerOutcome) -> tuple[str, ...]:
    name = f"{layer.path or '(model)'}: {layer.kind}" + (f" x{layer.num_calls}" if layer.num_calls > 1 else "")
    return name, layer.scheme or "as it was", duration(layer.call_s), "", "", "", layer.why


def _row(layer: LayerOutcome, trial: SchemeTrial) -> tuple[str, ...]:
    ratio = "" if trial.ratio is None else f"{trial.ratio:.2f} [{trial.ratio_low:.2f}, {trial.ratio_high:.2f}]"
    error = "" if trial.layer_error is None else f"{trial.layer_error:.2g}"
    cost = "" if trial.cost is None else f"{trial.cost:.2g}"
    why = "taken" if trial.scheme == layer.scheme else trial.why
    return "", trial.scheme, duration(trial.call_s), ratio, error, cost, why


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
