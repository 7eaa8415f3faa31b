"""What other processes took of the machine while the steps were timed."""

from __future__ import annotations

from typing import Final

from flatout.core.records.record import Record

_BUSY_FRACTION: Final = 0.1
"""Of the cores (or the GPU). The system's own work stays below: 0.02 to 0.05 of two cores on an idle virtual machine."""


class MachineLoad(Record, frozen=True, kw_only=True):
    """Mean numbers of cores that were busy while the steps were timed, of the `num_cores` that the process may use.

    None is what could not be read.
    """

    seconds: float
    """How long the readings lie apart, all timed stretches together."""
    num_cores: int
    own_cores: float
    """Busy with this process and those that it has started (workers)."""
    other_cores: float | None = None
    """Busy with other processes."""
    stolen_cores: float = 0.0
    """Not given to this virtual machine by its host, although there was work for them (steal time)."""
    waiting_threads: float | None = None
    """Threads of this process that were ready to run and had no core."""
    throttled_fraction: float = 0.0
    """Share of the time in which the CPU quota of its control group (a container's limit) stopped the process."""
    gpu_other_fraction: float | None = None
    """Share of the time in which the GPU worked for other processes."""

    @property
    def is_busy_with_others(self) -> bool:
        """Whether other processes used so much of the cores that the steps' times suffer."""
        return (self.other_cores or 0.0) >= _BUSY_FRACTION * self.num_cores

    @property
    def is_stolen_from(self) -> bool:
        """Whether the host of the virtual machine kept back so much."""
        return self.stolen_cores >= _BUSY_FRACTION * self.num_cores

    @property
    def is_throttled(self) -> bool:
        """Whether a quota stopped the process for so much of the time."""
        return self.throttled_fraction >= _BUSY_FRACTION

    @property
    def is_gpu_shared(self) -> bool:
        """Whether the GPU worked for others for so much of the time."""
        return (self.gpu_other_fraction or 0.0) >= _BUSY_FRACTION

    @property
    def is_disturbed(self) -> bool:
        """Whether anything but the script itself made its steps longer."""
        return self.is_busy_with_others or self.is_stolen_from or self.is_throttled or self.is_gpu_shared
