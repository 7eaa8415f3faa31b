"""Who uses the processor's cores: this process, others, or the host of the virtual machine. Linux; elsewhere nothing is known."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Final, NamedTuple

from flatout.core.records.load import MachineLoad
from flatout.core.runtime.process_tree import descendants, processes

_PROC: Final = Path("/proc")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_LEAST_S: Final = 0.3
"""The kernel counts in ticks of 10 ms: over less time than this one tick is 3 % of a core."""


class LoadReading(NamedTuple):
    """What was counted until now, in seconds: of the cores that the process may use, of itself, of its threads."""

    at_s: float
    busy_s: float
    """Of these cores, by anybody."""
    stolen_s: float
    own_s: float
    """Of this process and those below it."""
    waited_s: float | None
    """Threads of this process, ready to run, without a core."""
    throttled_s: float
    num_cores: int


class TimedLoad(NamedTuple):
    """Sums over the stretches in which steps were timed, between two readings each."""

    stretches: tuple[tuple[LoadReading, LoadReading], ...] = ()

    def between(self, before: LoadReading | None, after: LoadReading | None) -> TimedLoad:
        """The same with one stretch more, where both of its ends could be read."""
        return self if before is None or after is None else TimedLoad((*self.stretches, (before, after)))

    def load(self) -> MachineLoad | None:
        """The mean load of all stretches; None where they were too short to tell."""
        seconds = self._sum("at_s")
        if seconds < _LEAST_S:
            return None
        own, stolen = self._sum("own_s") / seconds, self._sum("stolen_s") / seconds
        busy = self._sum("busy_s") / seconds
        waits = [after.waited_s is not None and before.waited_s is not None for before, after in self.stretches]
        return MachineLoad(
            seconds=seconds,
            num_cores=self.stretches[-1][1].num_cores,
            own_cores=own,
            # A system that counts nothing (some sandboxes) has cores that are never busy.
            other_cores=max(0.0, busy - own) if busy > 0 else None,
            stolen_cores=max(0.0, stolen),
            waiting_threads=max(0.0, self._sum("waited_s") / seconds) if all(waits) else None,
            throttled_fraction=min(1.0, max(0.0, self._sum("throttled_s") / seconds)),
        )

    def _sum(self, name: str) -> float:
        return sum((getattr(after, name) or 0.0) - (getattr(before, name) or 0.0) for before, after in self.stretches)


def read_load() -> LoadReading | None:
    """What the system has counted until now; None where it does not say. Takes some 20 us for each process of the system."""
    if not (_PROC / "stat").is_file() or not hasattr(os, "sched_getaffinity"):
        return None
    cores = os.sched_getaffinity(0)
    try:
        busy_s, stolen_s = cores_of((_PROC / "stat").read_text().splitlines(), cores)
    except (OSError, ValueError):
        return None
    known = processes()
    own = [pid for pid in (os.getpid(), *descendants(os.getpid(), known)) if pid in known]
    return LoadReading(
        at_s=perf_counter(),
        busy_s=busy_s,
        stolen_s=stolen_s,
        own_s=sum(known[pid].processor_s for pid in own),
        waited_s=_waited_s(),
        throttled_s=_throttled_s(),
        num_cores=len(cores),
    )


def cores_of(lines: Iterable[str], cores: set[int]) -> tuple[float, float]:
    """Seconds that these cores were busy, and that their host kept them back, from the lines of /proc/stat (proc(5)).

    A container sees the lines of all cores of its host. Waiting for a disk is idle; a guest's time is in `user` already.

    >>> cores_of(["cpu0 100 0 100 5 5 0 0 100 0 0", "cpu1 1 1 1 1 1 1 1 1 0 0"], {0})
    (2.0, 1.0)
    """
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    busy = stolen = 0
    for line in lines:
        name, *fields = line.split() or [""]
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, _idle, _disk, irq, soft_irq, steal = (int(field) for field in fields[:8])
            busy += user + nice + system + irq + soft_irq
            stolen += steal
    return busy * tick_s, stolen * tick_s


def _waited_s() -> float | None:
    """Seconds that threads of this process waited on a run queue (second field of schedstat); None where it is not counted."""
    total = 0
    try:
        for thread in (_PROC / "self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
                total += int((thread / "schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return total * 1e-9 if total else None


def _throttled_s() -> float:
    """Seconds for which a quota has stopped the control group of this process; 0 where there is no quota."""
    group = ""
    with suppress(OSError):
        lines = (_PROC / "self/cgroup").read_text().splitlines()
        group = next((line.partition("::")[2].strip("/") for line in lines if line.startswith("0::")), "")
    for path in (_CGROUPS / group / "cpu.stat", _CGROUPS / "cpu.stat", _CGROUPS / "cpu" / "cpu.stat"):
        with suppress(OSError, ValueError, IndexError):
            counts = dict(line.split() for line in path.read_text().splitlines())
            if "throttled_usec" in counts:
                return int(counts["throttled_usec"]) * 1e-6
            if "throttled_time" in counts:
                return int(counts["throttled_time"]) * 1e-9
    return 0.0


def cpu_quota() -> float | None:
    """Cores that the control group lets this process use on average; None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int(Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int(Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    except (OSError, ValueError):
        return None
