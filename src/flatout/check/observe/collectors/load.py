"""What other processes took of the machine while the steps were timed."""

from __future__ import annotations

import os
from time import time  # noqa: TID251  # the driver's samples carry Unix times
from typing import Final

import msgspec
import torch

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.core.records.evidence import Evidence
from flatout.core.records.load import MachineLoad
from flatout.core.runtime.process_tree import descendants, processes
from flatout.machine.measure.gpu_sharing import gpu_other_fraction
from flatout.machine.measure.processor_load import LoadReading, TimedLoad, read_load


class LoadOfMachine(Collector):
    """Reads the system's counters at both ends of each series of light steps."""

    def __init__(self, observation: ObservationState) -> None:
        self._observation = observation
        self._timed = TimedLoad()
        self._began: LoadReading | None = None
        self._began_unix_s = 0.0

    def restart(self) -> None:
        """Forget all: the steps begin anew."""
        self._timed = TimedLoad()
        self._began = None

    def begin_light(self) -> None:
        """Read the counters before the first of the steps. Ranks are one another's neighbours: nothing is told of them."""
        self._began = read_load() if self._observation.place is None else None
        self._began_unix_s = time()

    def end_light(self) -> None:
        """Add what was counted since."""
        self._timed = self._with_now()
        self._began = None

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `load`, what was read until now."""
        load = self._with_now().load()
        return evidence if load is None else msgspec.structs.replace(evidence, load=self._with_gpu(load))

    def _with_now(self) -> TimedLoad:
        return self._timed if self._began is None else self._timed.between(self._began, read_load())

    def _with_gpu(self, load: MachineLoad) -> MachineLoad:
        if not self._observation.is_device:
            return load
        own = {os.getpid(), *descendants(os.getpid(), processes())}
        share = gpu_other_fraction(torch.cuda.current_device(), since_s=self._began_unix_s, own=own)
        return msgspec.structs.replace(load, gpu_other_fraction=share)


COLLECTOR: Final = CollectorEntry(LoadOfMachine)
