"""The node that a job runs on, sampled now and then: how busy its GPUs or its cores are with the job, and how well it is."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence
from time import perf_counter, process_time
from typing import Final, NamedTuple, TypeVar

import torch

from flatout.app.fleet.identity import JobPlace
from flatout.core.records.job import JobRecord, NodeHealth
from flatout.core.records.load import MachineLoad
from flatout.machine.measure.gpu_sensors import GpuReading, GpuSensors
from flatout.machine.measure.processor_load import TimedLoad, read_load

N = TypeVar("N", int, float)
_SHARE: Final = 2e-3
"""Readings of the machine's load may take so much of a job's time; each looks at all processes of the machine."""


class NodeReadings(NamedTuple):
    """What the samples say together; None is not known."""

    utilisation: float | None
    memory_bytes: int | None
    health: NodeHealth


class _GpuSums:
    """Sums over all readings of GPUs: a job may run for months, and its record takes no more room for that."""

    def __init__(self) -> None:
        self.num_samples = self._num_readings = self._num_busy = self._num_throttled = 0
        self._busy = 0.0
        self._faults: Counter[str] = Counter()
        self.hottest_c: float | None = None
        self.ecc_errors: int | None = None

    def add(self, readings: Sequence[GpuReading]) -> None:
        """One sample: a reading of each GPU."""
        self.num_samples += bool(readings)
        for reading in readings:
            self._num_readings += 1
            self._num_throttled += bool(reading.faults)
            self._faults.update(reading.faults)
            if reading.busy_fraction is not None:
                self._num_busy, self._busy = self._num_busy + 1, self._busy + reading.busy_fraction
            self.hottest_c = _larger(self.hottest_c, reading.temperature_c)
            self.ecc_errors = _larger(self.ecc_errors, reading.ecc_errors)

    @property
    def busy_fraction(self) -> float | None:
        return self._busy / self._num_busy if self._num_busy else None

    @property
    def throttled_fraction(self) -> float | None:
        return self._num_throttled / self._num_readings if self._num_readings else None

    @property
    def throttled_because(self) -> str:
        return ", ".join(name for name, _ in self._faults.most_common(2))


class NodeWatch:
    """Collects samples; all means are over the time since it was made."""

    def __init__(self, record: JobRecord, place: JobPlace) -> None:
        self._record = record
        self._is_alone = place.local_world_size == 1
        """Else the node's other ranks would count as others."""
        self._sensors = GpuSensors(_uuids(place.local_world_size)) if record.num_gpus else None
        self._gpus = _GpuSums()
        self._began_s, self._processor_s = perf_counter(), process_time()
        self._first_load = read_load() if self._is_alone else None
        self._load, self._load_cost_s = TimedLoad(), 0.0

    def sample(self) -> None:
        """Take one sample of GPUs and of the machine's load."""
        if self._sensors is not None:
            self._gpus.add(self._sensors.read())
        began = perf_counter()
        if self._is_alone and self._load_cost_s <= _SHARE * (began - self._began_s):
            self._load = TimedLoad().between(self._first_load, read_load())
            self._load_cost_s += perf_counter() - began

    def readings(self) -> NodeReadings:
        """All that the samples say together until now."""
        gpus, load = self._gpus, self._load.load()
        health = NodeHealth(
            num_samples=gpus.num_samples,
            throttled_fraction=gpus.throttled_fraction,
            throttled_because=gpus.throttled_because,
            hottest_c=gpus.hottest_c,
            ecc_errors=gpus.ecc_errors,
            other_cores=load.other_cores if load is not None else None,
            stolen_cores=load.stolen_cores if load is not None else None,
        )
        utilisation = gpus.busy_fraction if self._record.num_gpus else self._cores_fraction(load)
        return NodeReadings(utilisation, self._memory_bytes(), health)

    def _cores_fraction(self, load: MachineLoad | None) -> float | None:
        """The share of its cores that the job used: with its loaders' workers, where that was read; else this process alone."""
        if load is not None:
            return min(1.0, load.own_cores / max(1, load.num_cores))
        seconds = perf_counter() - self._began_s
        cores = self._record.num_cores / self._record.local_world_size
        return min(1.0, (process_time() - self._processor_s) / (seconds * max(1.0, cores))) if seconds > 0 else None

    def _memory_bytes(self) -> int | None:
        if self._record.num_gpus:
            return max(torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count()))
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _larger(one: N | None, other: N | None) -> N | None:
    """The larger of two numbers, of which either may be unknown."""
    return other if one is None else one if other is None else max(one, other)


def _uuids(local_world_size: int) -> list[str]:
    """The GPUs of the node's ranks: as many as there are ranks, where each sees them all, else those that this one sees."""
    every = range(torch.cuda.device_count())
    used = every[:local_world_size] if local_world_size > 1 else [i for i in every if torch.cuda.memory_reserved(i) > 0]
    return [str(torch.cuda.get_device_properties(i).uuid) for i in used]
