"""What an accelerator did in one step: kernels, idle gaps, copies, waits. From the device's own clock.

All times are seconds of that one step.
"""

from __future__ import annotations

from typing import Literal

from flatout.core.records.record import Record


class DeviceKernel(Record, frozen=True, kw_only=True):
    """All launches of one kernel from one line in one phase."""

    name: str
    source: int
    phase: str
    num_launches: int
    seconds: float
    num_blocks: int = 0
    """Thread blocks of one launch, 0 when unknown: what wave quantisation is computed from."""
    blocks_per_sm: int = 0
    uses_matrix_units: bool | None = None
    op: str = ""


class Gap(Record, frozen=True, kw_only=True):
    """Time the device idled before the work launched from this line; summed over the step."""

    source: int
    num: int
    seconds: float
    cause: Literal["late-launch", "host-wait", "copy", "data", "unknown"]


class Copy(Record, frozen=True, kw_only=True):
    """Copies between host and device issued from one line. `overlapped_s` ran beside kernels; `host_s` is the host's wait."""

    source: int
    direction: Literal["host-to-device", "device-to-host", "device-to-device"]
    memory: Literal["pageable", "pinned", "device", "unknown"]
    is_async: bool
    num: int
    bytes: int
    seconds: float
    overlapped_s: float
    host_s: float


class HostWait(Record, frozen=True, kw_only=True):
    """A runtime call in which the host waited for the device, by line.

    `op` is the operator that called it ('aten._local_scalar_dense'), 'synchronize' for torch.cuda.synchronize and its like,
    empty where it was called outside operators or that is not known.
    """

    source: int
    call: str
    num: int
    seconds: float
    op: str = ""


class DeviceStep(Record, frozen=True, kw_only=True):
    """One profiled step. `busy_s` is the union of all kernels and copies, `span_s` from the first to the last.

    `slowdown` is the profiled step's length over the honest step's. Where it is known, `gaps` are those of the honest step: what
    the busy time leaves of it, shared out as in the profiled one. In an imported trace they are the profiled step's own.
    """

    name: str
    span_s: float
    busy_s: float
    kernels: tuple[DeviceKernel, ...] = ()
    gaps: tuple[Gap, ...] = ()
    copies: tuple[Copy, ...] = ()
    waits: tuple[HostWait, ...] = ()
    slowdown: float | None = None
    num_sms: int | None = None
    clock_fraction: float | None = None
    """SM clock over its maximum during the steps; None where it could not be read."""
    throttle_reasons: tuple[str, ...] = ()
