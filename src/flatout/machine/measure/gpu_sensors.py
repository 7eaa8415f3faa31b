"""What the driver says of GPUs while something runs on them: how busy, how hot, throttled, memory errors. Through NVML."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

THROTTLED: Final = {
    0x4: "power limit",
    0x8: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""Bits of nvmlClocksEventReasons that slow a working device; idle, application clocks and sync boost are no fault (nvml.h)."""
FAULTS: Final = 0x8 | 0x20 | 0x40 | 0x80
"""Those of them that a healthy node does not show: at its power limit a GPU does what it was built for."""


class GpuReading(NamedTuple):
    """One GPU at one moment; None is what the driver does not say.

    `busy_fraction` is the share of the driver's last sample period in which a kernel ran, `faults` why it is slowed down besides
    its power limit, `ecc_errors` those that could not be corrected since the driver was loaded.
    """

    busy_fraction: float | None = None
    faults: tuple[str, ...] = ()
    temperature_c: float | None = None
    ecc_errors: int | None = None
    memory_bytes: int | None = None


def throttled_because(bits: int) -> tuple[str, ...]:
    """What slows the device, from the driver's bits.

    >>> throttled_because(0x5)
    ('power limit',)
    """
    return tuple(name for bit, name in THROTTLED.items() if bits & bit)


class GpuSensors:
    """The sensors of some GPUs; a reading takes a millisecond for each. Without NVML's binding there are none."""

    def __init__(self, uuids: Sequence[str]) -> None:
        """`uuids` as torch has them, with or without the 'GPU-' of the driver."""
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
        except Exception:  # noqa: BLE001  # no binding, no driver, or one that refuses: there is nothing to read
            return
        self._nvml = nvml
        for uuid in uuids:
            with suppress(nvml.NVMLError):
                self._handles.append(nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}".encode()))

    def read(self) -> list[GpuReading]:
        """Read the sensors of all GPUs once."""
        return [self._reading(handle) for handle in self._handles]

    def _reading(self, handle: Any) -> GpuReading:
        nvml, found = self._nvml, GpuReading()
        with suppress(nvml.NVMLError, AttributeError):
            found = found._replace(busy_fraction=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        with suppress(nvml.NVMLError, AttributeError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            found = found._replace(faults=throttled_because(bits & FAULTS))
        with suppress(nvml.NVMLError, AttributeError):
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            found = found._replace(temperature_c=float(temperature))
        with suppress(nvml.NVMLError, AttributeError):
            kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
            found = found._replace(ecc_errors=int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds)))
        with suppress(nvml.NVMLError, AttributeError):
            found = found._replace(memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).used))
        return found
