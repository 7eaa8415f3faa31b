"""A machine as a table: what was measured, what the data sheet says, and the fraction of it that is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from flatout.core import units
from flatout.core.records.hardware import Figure, HardwareSpec, Machine
from flatout.report.document import Block, Column, Heading, Table, numbers
from flatout.report.sanitise import Words

_PRODUCT = "matmul_flop_per_s."
_SUSTAINED = "sustained_flop_per_s."
_TIMES = {
    "dispatch_s": "dispatch, forward",
    "dispatch_grad_s": "dispatch, with gradient",
    "launch_s": "launch to launch",
    "sync_s": "host reads a number",
}


class _MachineRow(NamedTuple):
    label: str
    figure: str
    value: float
    shown: Callable[[float], str]
    vendor: Figure | None = None


def machine_blocks(machine: Machine, spec: HardwareSpec | None) -> list[Block]:
    """The machine, its figures in a table, and notes on what is not known; `spec` is its data sheet."""
    of_sheet = numbers("data sheet", "reached") if spec is not None else ()
    rows = [
        [
            row.label,
            row.shown(row.value),
            units.percent(machine.spread.get(row.figure)),
            *(_beside(row) if spec is not None else ()),
            machine.conditions.get(row.figure, ""),
        ]
        for row in _rows(machine, spec)
    ]
    table = Table([Column(), *numbers("measured", "spread"), *of_sheet, Column("how", style="dim")], rows, inset=0)
    return [*_head(machine, spec), "", table, *_notes(machine)]


def _beside(row: _MachineRow) -> tuple[str, str]:
    """What the data sheet says, and how much of that is reached."""
    vendor = row.vendor.value if row.vendor is not None else None
    return (units.UNKNOWN, "") if vendor is None else (row.shown(vendor), units.percent(row.value / vendor))


def _head(machine: Machine, spec: HardwareSpec | None) -> Iterator[Block]:
    yield Heading(machine.device_name if spec is None else f"{machine.device_name} ({spec.name})", is_title=True)
    cores = f"{machine.num_cores} cores, {machine.num_threads} threads"
    on = "" if machine.device_name == machine.cpu_model else f"{machine.cpu_model}, "
    sizes = f"{units.size(machine.memory_bytes)} memory, {units.size(machine.cache_bytes)} last-level cache"
    yield f"{on}{cores}, {sizes}, torch {machine.torch_version}"
    yield Words(f"{machine.effort} probe of {units.duration(machine.seconds)}, {machine.measured_at}", style="dim")


def _rows(machine: Machine, spec: HardwareSpec | None) -> Iterator[_MachineRow]:
    for label, prefix, rates in (
        ("product", _PRODUCT, machine.matmul_flop_per_s),
        ("sustained", _SUSTAINED, machine.sustained_flop_per_s),
    ):
        for dtype, rate in rates.items():
            yield _MachineRow(f"{label}, {dtype}", f"{prefix}{dtype}", rate, units.work_rate, _best_rate(spec, dtype))
    memory = spec.memory_bytes_per_s if spec else None
    pcie = next((link.bytes_per_s for link in spec.links if link.name == "pcie"), None) if spec else None
    bandwidths = {
        "copy_bytes_per_s": ("copy, memory", memory),
        "cache_bytes_per_s": ("copy, cache", None),
        "h2d_pageable_bytes_per_s": ("host to device, pageable", pcie),
        "h2d_pinned_bytes_per_s": ("host to device, pinned", pcie),
    }
    for figure, (label, vendor) in bandwidths.items():
        if (bytes_per_s := getattr(machine, figure)) is not None:
            yield _MachineRow(label, figure, bytes_per_s, units.size_rate, vendor)
    for figure, label in _TIMES.items():
        if (seconds := getattr(machine, figure)) is not None:
            yield _MachineRow(label, figure, seconds, units.duration)


def _best_rate(spec: HardwareSpec | None, dtype: str) -> Figure | None:
    rates = [rate.flop_per_s for rate in spec.rates if rate.dtype == dtype] if spec else []
    return max(rates, key=lambda figure: figure.value, default=None)


def _notes(machine: Machine) -> Iterator[Block]:
    if machine.processor_share is not None and machine.processor_share < 0.9:
        got = units.percent(machine.processor_share)
        yield ""
        yield Words(
            f"The machine was busy: the probe got {got} of its processors. Measure again with --refresh.", "yellow"
        )
    if machine.unknown:
        yield ""
    for figure, why in machine.unknown.items():
        yield Words(f"{figure.removeprefix(_PRODUCT)}: not known, {why}", style="dim")
