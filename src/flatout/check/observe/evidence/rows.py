"""Equal calls of the deep steps added up, with the times of an honest step where they ran on a device.

Events around an operator also span its launch, and recording slows the host down, so neither side of a device's row is honest.
The profiled step says how long the kernels of each line's operators take; the light steps say how long the host can have worked
at most: the step less what it waited for the device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal, NamedTuple

from flatout.check.observe.operators.recorder import OperatorKey
from flatout.core.records.device import DeviceStep
from flatout.core.records.evidence import HostRead

Bound = Literal["sum", "device", "host"]
"""What a step waits for: operators and Python one after the other (a CPU), or the slower of device and host."""

_HOST_LEADS: Final = 0.9
"""A device that is busy for less than this share of the host's work waits for the host."""

_Key = tuple[int, str, str]


class OperatorRow(NamedTuple):
    """One row's seconds in all deep steps together.

    `op_s` is the operators' own time, on a device the device's; `python_s` the host's beside it, of which `dispatch_s` lies
    inside the operators' calls (0 on a CPU, where that is `op_s`).
    """

    key: OperatorKey
    num_calls: int
    op_s: float
    python_s: float
    dispatch_s: float = 0.0

    def scaled(self, factor: float) -> OperatorRow:
        """The row with all its times multiplied."""
        return self._replace(
            op_s=self.op_s * factor, python_s=self.python_s * factor, dispatch_s=self.dispatch_s * factor
        )


GROUPS: Final = ("backward", "optimizer", "environment")
"""Phases whose operators are scaled to the time that the phase has in a light step."""


def phase_group(phase: str) -> str:
    """The group of phases whose time a light step knows: one of GROUPS, or 'rest' for all others."""
    return phase if phase in GROUPS else "rest"


def waited_s(reads: Iterable[HostRead], step: DeviceStep | None) -> float:
    """Seconds of a step in which the host did nothing but wait for the device.

    Reads are timed in light steps; the profiled step also shows waits that read nothing (`torch.cuda.synchronize`).
    """
    in_reads_s = sum(r.wait_s for r in reads if r.on_device)
    return max(in_reads_s, sum(w.seconds for w in step.waits) if step is not None else 0.0)


def bound_of(device_s: float, *, step_s: float, wait_s: float) -> Bound:
    """Whether a step waits for the device or the host, by the device's busy time, the step, and the host's waits."""
    return "device" if device_s >= _HOST_LEADS * max(0.0, step_s - wait_s) else "host"


def to_kernels(rows: list[OperatorRow], step: DeviceStep | None, num_steps: int, busy_s: float) -> list[OperatorRow]:
    """Rows whose device seconds (`op_s`, of `num_steps` steps together) add up to `busy_s` a step.

    Kernels launched by an operator of a line are shared out among the rows of that operator and line, in proportion to what
    their events say. Rows without kernels of their own (views; lines that the profiler does not know) share what is left of the
    busy time, and never take longer than their events.
    """
    kernel_s: dict[_Key, float] = defaultdict(float)
    for kernel in step.kernels if step is not None else ():
        if kernel.op:
            kernel_s[kernel.source, phase_group(kernel.phase), kernel.op] += kernel.seconds
    event_s: dict[_Key, float] = defaultdict(float)
    for row in rows:
        event_s[_key(row)] += row.op_s / num_steps
    matched_s = sum(s for key, s in kernel_s.items() if event_s.get(key, 0.0) > 0)
    factor = min(1.0, busy_s / matched_s) if matched_s > 0 else 1.0  # kernels beside one another on several streams
    rest_s = sum(s for key, s in event_s.items() if key not in kernel_s)
    rest = min(1.0, max(0.0, busy_s - matched_s) / rest_s) if rest_s > 0 else 1.0
    found = []
    for row in rows:
        key = _key(row)
        scale = factor * kernel_s[key] / event_s[key] if key in kernel_s and event_s[key] > 0 else rest
        found.append(row._replace(op_s=row.op_s * scale))
    return found


def to_host(rows: list[OperatorRow], num_steps: int, most_s: float) -> list[OperatorRow]:
    """Rows whose host seconds add up to `most_s` a step at most."""
    host_s = sum(r.python_s for r in rows) / num_steps
    scale = min(1.0, most_s / host_s) if host_s > 0 else 1.0
    return [r._replace(python_s=r.python_s * scale, dispatch_s=r.dispatch_s * scale) for r in rows]


def _key(row: OperatorRow) -> _Key:
    return row.key.site, phase_group(row.key.phase), row.key.op
