from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.machine.measure.gpu_sensors import FAULTS, THROTTLED, GpuReading, GpuSensors


class NVMLError(Exception):
    pass


def nvml(**changes: Any) -> Any:
    """NVML's binding with one busy, hot GPU."""
    functions: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=73),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x4 | 0x40,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetTemperature": lambda handle, kind: 88,
        "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
        "NVML_VOLATILE_ECC": 0,
        "nvmlDeviceGetTotalEccErrors": lambda handle, kind, counter: 2,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=5 << 30),
    }
    return SimpleNamespace(**functions | changes)


def test_all_that_the_driver_says_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())

    (reading,) = GpuSensors(["abc"]).read()

    assert reading == GpuReading(0.73, ("temperature (hardware)",), 88.0, 2, 5 << 30)


def test_what_the_driver_does_not_say_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise NVMLError

    monkeypatch.setitem(
        sys.modules, "pynvml", nvml(nvmlDeviceGetTotalEccErrors=refuse, nvmlDeviceGetUtilizationRates=refuse)
    )

    (reading,) = GpuSensors(["abc"]).read()

    assert (reading.busy_fraction, reading.ecc_errors, reading.temperature_c) == (None, None, 88.0)


def test_a_gpu_that_cannot_be_found_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_uuid(uuid: bytes) -> bytes:
        if b"gone" in uuid:
            raise NVMLError
        return uuid

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetHandleByUUID=by_uuid))

    assert len(GpuSensors(["gone", "here"]).read()) == 1


def test_without_a_driver_there_is_nothing_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise NVMLError

    for module in (None, nvml(nvmlInit=refuse)):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        assert GpuSensors(["abc"]).read() == []


def test_a_power_limit_is_no_fault() -> None:
    assert [name for bit, name in THROTTLED.items() if not bit & FAULTS] == ["power limit"]
