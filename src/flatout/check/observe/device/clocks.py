"""The device's clock and why the driver throttles it: through NVML where its binding is there, else nvidia-smi."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from typing import Any, Final, NamedTuple

import torch

from flatout.machine.measure.gpu_sensors import throttled_because

_TIMEOUT_S: Final = 5.0


class Clocks(NamedTuple):
    """SM clock over its maximum, and what holds it back; None and nothing where that cannot be had."""

    fraction: float | None = None
    reasons: tuple[str, ...] = ()


def read_clocks(device: int) -> Clocks:
    """The clock now, of a device by torch's index. Takes a millisecond through NVML, a tenth of a second through nvidia-smi."""
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    except (AttributeError, AssertionError, RuntimeError):
        return Clocks()
    found = _by_nvml(uuid)
    return found if found is not None else _by_command(uuid)


def clocks_of(line: str) -> Clocks:
    """The clocks in a line of `nvidia-smi --query-gpu=clocks.sm,clocks.max.sm,clocks_throttle_reasons.active`, without units.

    >>> clocks_of("1350, 1980, 0x0000000000000004")
    Clocks(fraction=0.6818181818181818, reasons=('power limit',))
    """
    parts = [p.strip() for p in line.split(",")]
    try:
        now, most, bits = float(parts[0]), float(parts[1]), int(parts[2], 16)
    except (IndexError, ValueError):
        return Clocks()
    return Clocks(min(1.0, now / most) if most else None, throttled_because(bits))


def _by_nvml(uuid: str) -> Clocks | None:
    """None when the binding is not installed or the driver refuses."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
            now = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
            most = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, AttributeError):
        return None
    return Clocks(min(1.0, now / most) if most else None, throttled_because(bits))


def _by_command(uuid: str) -> Clocks:
    path = shutil.which("nvidia-smi")
    if path is None:
        return Clocks()
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks_throttle_reasons.active"
    try:
        done = subprocess.run(
            [path, "-i", uuid, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Clocks()
    return clocks_of(done.stdout.splitlines()[0]) if done.returncode == 0 and done.stdout.strip() else Clocks()
