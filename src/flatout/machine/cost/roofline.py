"""The least time an operation can take on a device, and what holds it there.

The roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009) with the host's dispatch as a third limit, which
bounds eager programs: time >= max(work / arithmetic rate, traffic / bandwidth, operators * dispatch).
"""

from __future__ import annotations

from collections.abc import Collection
from math import isfinite
from typing import Literal

from flatout.core.errors import HardwareError, UsageError
from flatout.core.records.hardware import HardwareSpec, Machine
from flatout.core.records.record import Record

Regime = Literal["compute", "bandwidth", "overhead"]


class Floor(Record, frozen=True, kw_only=True):
    """The limits of one operation, in seconds.

    `floor_s` is the device's own, max(compute_s, bandwidth_s); `overhead_s` what the host needs to dispatch it, None
    for a data sheet, which does not know; `regime` names the largest limit.
    """

    floor_s: float
    compute_s: float
    bandwidth_s: float
    overhead_s: float | None
    regime: Regime


def operation_floor(device: Machine | HardwareSpec, *, flop: float, traffic_bytes: float, dtype: str) -> Floor:
    """The floor of an operator that does `flop` in `dtype` and must move `traffic_bytes` (read plus write).

    A measured machine gives what a program can reach, so a good kernel may go a few percent below it; a data sheet
    gives what nothing can pass. Traffic that fits the last-level cache is charged at the cache's measured bandwidth.

    Raises HardwareError when a rate that is needed is unknown, UsageError for negative amounts.
    """
    if flop < 0 or traffic_bytes < 0:
        raise UsageError(f"flop {flop}, traffic_bytes {traffic_bytes}: neither may be negative")
    compute_s = flop / peak_flop_per_s(device, dtype) if flop else 0.0
    bandwidth_s = traffic_bytes / bandwidth_bytes_per_s(device, traffic_bytes=traffic_bytes) if traffic_bytes else 0.0
    overhead_s = device.dispatch_s if isinstance(device, Machine) else None
    limits: dict[Regime, float] = {"compute": compute_s, "bandwidth": bandwidth_s, "overhead": overhead_s or 0.0}
    return Floor(
        floor_s=max(compute_s, bandwidth_s),
        compute_s=compute_s,
        bandwidth_s=bandwidth_s,
        overhead_s=overhead_s,
        regime=max(limits, key=lambda regime: limits[regime]),
    )


class Roof(Record, frozen=True, kw_only=True):
    """One ceiling of a machine: FLOP/s of a dtype, or bytes/s of a memory."""

    name: str
    rate: float


def roofs(machine: Machine, *, dtypes: Collection[str]) -> tuple[tuple[Roof, ...], tuple[Roof, ...]]:
    """The ceilings (arithmetic, bandwidth) that a program with tensors of these dtypes can meet, as measured.

    'float32' brings 'tf32' with it; where no dtype was measured, float32 stands for them all.
    """
    wanted = {*dtypes, "tf32"} if "float32" in dtypes else set(dtypes)
    known = machine.matmul_flop_per_s
    names = [d for d in known if d in wanted and not d.startswith(("int", "uint"))] or ["float32"]
    compute = {d: known.get(d, 0.0) for d in names}
    memory = {"memory": machine.copy_bytes_per_s, "cache": machine.cache_bytes_per_s or 0.0}
    if memory["cache"] <= memory["memory"]:
        del memory["cache"]
    flat, slanting = (
        tuple(Roof(name=n, rate=r) for n, r in rates.items() if r > 0 and isfinite(r)) for rates in (compute, memory)
    )
    return flat, slanting


def peak_flop_per_s(device: Machine | HardwareSpec, dtype: str) -> float:
    """The fastest arithmetic in `dtype` ('float32', without TF32; 'tf32'; 'bfloat16'; ...).

    Raises HardwareError when the device's figure is unknown.
    """
    if isinstance(device, Machine):
        known = dict(device.matmul_flop_per_s)
    else:
        known = {}
        for rate in device.rates:
            known[rate.dtype] = max(rate.flop_per_s.value, known.get(rate.dtype, 0.0))
    if dtype not in known:
        why = _why_unknown(device, f"matmul_flop_per_s.{dtype}", "rates")
        names = ", ".join(known) or "none"
        raise HardwareError(f"no rate for '{dtype}' on '{device.id}'{why}; known: {names}")
    return known[dtype]


def bandwidth_bytes_per_s(device: Machine | HardwareSpec, *, traffic_bytes: float | None = None) -> float:
    """Bandwidth of memory, or of the cache when `traffic_bytes` fit it and its bandwidth was measured.

    Raises HardwareError when the device's figure is unknown.
    """
    if isinstance(device, Machine):
        fits = traffic_bytes is not None and device.cache_bytes is not None and traffic_bytes <= device.cache_bytes
        if fits and device.cache_bytes_per_s is not None:
            return max(device.cache_bytes_per_s, device.copy_bytes_per_s)
        return device.copy_bytes_per_s
    if device.memory_bytes_per_s is None:
        why = _why_unknown(device, "memory_bytes_per_s")
        raise HardwareError(f"no memory bandwidth for '{device.id}'{why}; measure the machine with 'flatout machine'")
    return device.memory_bytes_per_s.value


def memory_bytes(spec: HardwareSpec) -> float:
    """How much memory a device has, by its data sheet.

    Raises HardwareError when that is unknown.
    """
    if spec.memory_bytes is None:
        raise HardwareError(f"the data sheet of '{spec.id}' does not say how much memory it has")
    return spec.memory_bytes.value


def _why_unknown(device: Machine | HardwareSpec, *figures: str) -> str:
    reasons = [device.unknown[figure] for figure in figures if figure in device.unknown]
    return f" ({reasons[0]})" if reasons else ""
