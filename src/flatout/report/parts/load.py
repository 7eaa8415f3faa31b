"""What a report says first: that the machine was busy with something else while the steps were timed."""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core import units
from flatout.core.records.evidence import Evidence
from flatout.core.records.load import MachineLoad

_SO = "times are longer and less sure than on a quiet machine"


def load_message(evidence: Evidence) -> str:
    """Who disturbed the steps, with figures; '' on a quiet machine and where it is not known."""
    load = evidence.load
    if load is None or not load.is_disturbed:
        return ""
    causes = "; ".join(_causes(load))
    return f"{causes}; {_SO}."


def _causes(load: MachineLoad) -> Iterator[str]:
    cores = units.counted(load.num_cores, "core")
    when = " while the steps were timed"
    if load.is_busy_with_others:
        yield f"Other processes used {load.other_cores:.1f} of {cores}{when}"
        when = ""
    if load.is_stolen_from:
        yield f"The host of this virtual machine kept back {load.stolen_cores:.1f} of {cores}{when}"
        when = ""
    if load.is_throttled:
        yield f"A CPU quota (cgroup) stopped the process for {units.percent(load.throttled_fraction)} of the time{when}"
        when = ""
    if load.is_gpu_shared:
        yield f"The GPU worked for other processes for {units.percent(load.gpu_other_fraction)} of the time{when}"
