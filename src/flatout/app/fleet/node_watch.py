"""The node that a job runs on, sampled now and then: how busy its GPUs or its cores are with the job, and how well it is."""

from __future__ import annotations

import os
import resource
from collections import Counter
from time import perf_counter, process_time
from typing import Final, NamedTuple

import torch

from flatout.app.fleet.identity import JobPlace
from flatout.core.records.job import JobRecord, NodeHealth
from flatout.machine.measure.gpu_sensors import GpuReading, GpuSensors
from flatout.machine.measure.processor_load import TimedLoad, read_load

_SHARE: Final = 2e-3
"""Of a job's time that readings of the machine's load may take; each looks at all processes of the machine."""


class NodeReadings(NamedTuple):
    """What the samples say together; None is not known."""

    utilisation: float | None
    memory_bytes: int | None
    health: NodeHealth


class NodeWatch:
    """Collects samples; all means are over the time since it was made."""

    def __init__(self, record: JobRecord, place: JobPlace) -> None:
        self._record = record
        self._is_alone = place.local_world_size == 1
        """Else the node's other ranks would count as others."""
        self._sensors = GpuSensors(_uuids(place.local_world_size)) if record.num_gpus else None
        self._gpus: list[list[GpuReading]] = []
        self._began_s, self._processor_s = perf_counter(), process_time()
        self._first_load = read_load() if self._is_alone else None
        self._load, self._load_cost_s = TimedLoad(), 0.0

    def sample(self) -> None:
        """Take one sample of GPUs and of the machine's load."""
        if self._sensors is not None and (readings := self._sensors.read()):
            self._gpus.append(readings)
        began = perf_counter()
        if self._is_alone and self._load_cost_s <= _SHARE * (began - self._began_s):
            self._load = TimedLoad().between(self._first_load, read_load())
            self._load_cost_s += perf_counter() - began

    def readings(self) -> NodeReadings:
        """All that the samples say together until now."""
        gpus = [reading for sample in self._gpus for reading in sample]
        load = self._load.load()
        faults = Counter(fault for reading in gpus for fault in reading.faults)
        errors = [r.ecc_errors for r in gpus if r.ecc_errors is not None]
        health = NodeHealth(
            num_samples=len(self._gpus),
            throttled_fraction=sum(bool(r.faults) for r in gpus) / len(gpus) if gpus else None,
            throttled_because=", ".join(name for name, _ in faults.most_common(2)),
            hottest_c=max((r.temperature_c for r in gpus if r.temperature_c is not None), default=None),
            ecc_errors=max(errors) if errors else None,
            other_cores=load.other_cores if load is not None else None,
            stolen_cores=load.stolen_cores if load is not None else None,
        )
        return NodeReadings(self._utilisation(gpus), self._memory_bytes(), health)

    def _utilisation(self, gpus: list[GpuReading]) -> float | None:
        busy = [r.busy_fraction for r in gpus if r.busy_fraction is not None]
        if busy:
            return sum(busy) / len(busy)
        seconds = perf_counter() - self._began_s
        if self._record.num_gpus or seconds <= 0:
            return None
        cores = self._record.num_cores / self._record.local_world_size
        return min(1.0, (process_time() - self._processor_s) / (seconds * max(1.0, cores)))

    def _memory_bytes(self) -> int | None:
        if self._record.num_gpus:
            return max(torch.cuda.max_memory_reserved(i) for i in range(torch.cuda.device_count()))
        unit = 1 if os.uname().sysname == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _uuids(local_world_size: int) -> list[str]:
    """The GPUs of the node's ranks: as many as there are ranks, where each sees them all, else those that this one sees."""
    every = range(torch.cuda.device_count())
    used = every[:local_world_size] if local_world_size > 1 else [i for i in every if torch.cuda.memory_reserved(i) > 0]
    return [str(torch.cuda.get_device_properties(i).uuid) for i in used]
