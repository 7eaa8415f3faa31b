"""A machine as a table: what was measured, what the data sheet says, and the fraction of it that is reached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.records.hardware import Figure, HardwareSpec, Machine
from flatout.reporting import units

_PRODUCT = "matmul_flop_per_s."
_SUSTAINED = "sustained_flop_per_s."
_TIMES = {
    "dispatch_s": "dispatch, forward",
    "dispatch_grad_s": "dispatch, with gradient",
    "launch_s": "launch to launch",
    "sync_s": "host reads a number",
}
_TRANSFERS = {
    "h2d_pageable_bytes_per_s": "host to device, pageable",
    "h2d_pinned_bytes_per_s": "host to device, pinned",
}


class _Row(NamedTuple):
    label: str
    figure: str
    measured: str
    value: float | None
    vendor: Figure | None = None
    vendor_shown: str = ""


def machine_text(machine: Machine, spec: HardwareSpec | None) -> RenderableType:
    """The table, with a head that names the machine and notes on what is not known; `spec` is its data sheet."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("spread", justify="right")
    if spec is not None:
        table.add_column("data sheet", justify="right")
        table.add_column("reached", justify="right")
    table.add_column("how", style="dim")
    for row in _rows(machine, spec):
        cells = [row.label, row.measured, units.percent(machine.spread.get(row.figure))]
        if spec is not None:
            cells += [row.vendor_shown or units.UNKNOWN, _reached(row)]
        table.add_row(*cells, machine.conditions.get(row.figure, ""))
    return Group(*_head(machine, spec), Text(), table, *_notes(machine))


def _head(machine: Machine, spec: HardwareSpec | None) -> Iterator[Text]:
    yield Text(machine.device_name if spec is None else f"{machine.device_name} ({spec.name})", style="bold")
    cores = f"{machine.num_cores} cores, {machine.num_threads} threads"
    on = "" if machine.device_name == machine.cpu_model else f"{machine.cpu_model}, "
    sizes = f"{units.size(machine.memory_bytes)} memory, {units.size(machine.cache_bytes)} last-level cache"
    yield Text(f"{on}{cores}, {sizes}, torch {machine.torch_version}")
    yield Text(f"{machine.effort} probe of {units.duration(machine.seconds)}, {machine.measured_at}", style="dim")


def _rows(machine: Machine, spec: HardwareSpec | None) -> Iterator[_Row]:
    for label, prefix, rates in (
        ("product", _PRODUCT, machine.matmul_flop_per_s),
        ("sustained", _SUSTAINED, machine.sustained_flop_per_s),
    ):
        for dtype, rate in rates.items():
            vendor = _best_rate(spec, dtype)
            shown = units.work_rate(vendor.value) if vendor else ""
            yield _Row(f"{label}, {dtype}", f"{prefix}{dtype}", units.work_rate(rate), rate, vendor, shown)
    memory = spec.memory_bytes_per_s if spec else None
    yield _bandwidth("copy, memory", "copy_bytes_per_s", machine.copy_bytes_per_s, memory)
    if machine.cache_bytes_per_s is not None:
        yield _bandwidth("copy, cache", "cache_bytes_per_s", machine.cache_bytes_per_s, None)
    pcie = next((link.bytes_per_s for link in spec.links if link.name == "pcie"), None) if spec else None
    for figure, label in _TRANSFERS.items():
        transfer: float | None = getattr(machine, figure)
        if transfer is not None:
            yield _bandwidth(label, figure, transfer, pcie)
    for figure, label in _TIMES.items():
        seconds: float | None = getattr(machine, figure)
        if seconds is not None:
            yield _Row(label, figure, units.duration(seconds), seconds)


def _bandwidth(label: str, figure: str, value: float, vendor: Figure | None) -> _Row:
    return _Row(label, figure, units.size_rate(value), value, vendor, units.size_rate(vendor.value) if vendor else "")


def _best_rate(spec: HardwareSpec | None, dtype: str) -> Figure | None:
    rates = [rate.flop_per_s for rate in spec.rates if rate.dtype == dtype] if spec else []
    return max(rates, key=lambda figure: figure.value, default=None)


def _reached(row: _Row) -> str:
    return units.percent(row.value / row.vendor.value) if row.value is not None and row.vendor else ""


def _notes(machine: Machine) -> Iterator[Text]:
    if machine.processor_share is not None and machine.processor_share < 0.9:
        got = units.percent(machine.processor_share)
        yield Text()
        yield Text(
            f"The machine was busy: the probe got {got} of its processors. Measure again with --refresh.", "yellow"
        )
    if machine.unknown:
        yield Text()
    for figure, why in machine.unknown.items():
        yield Text(f"{figure.removeprefix(_PRODUCT)}: not known, {why}", style="dim")
