"""What a device did, built by hand: 100 ms steps of which it is busy most, to which a test adds what it is about."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from tests.evidence_builder import MACHINE, EvidenceBuilder

from flatout.core.records.device import Copy, DeviceKernel, DeviceStep, Gap, HostWait
from flatout.core.records.evidence import Evidence
from flatout.core.records.hardware import Machine

GPU: Machine = msgspec.structs.replace(
    MACHINE, device_kind="cuda", device_name="NVIDIA H200", copy_bytes_per_s=4e12, launch_s=5e-6
)


def with_device(
    run: EvidenceBuilder,
    *,
    kernels: Iterable[DeviceKernel] = (),
    gaps: Iterable[Gap] = (),
    copies: Iterable[Copy] = (),
    waits: Iterable[HostWait] = (),
    slowdown: float | None = 1.1,
    clock_fraction: float | None = None,
    throttle_reasons: tuple[str, ...] = (),
) -> Evidence:
    """The Evidence of `run` with a device step of the same length and busy time."""
    evidence = run.build()
    assert evidence.steps.device_s is not None
    step = DeviceStep(
        name="NVIDIA H200",
        span_s=evidence.steps.step_s,
        busy_s=evidence.steps.device_s,
        kernels=tuple(kernels),
        gaps=tuple(gaps),
        copies=tuple(copies),
        waits=tuple(waits),
        slowdown=slowdown,
        num_sms=132,
        clock_fraction=clock_fraction,
        throttle_reasons=throttle_reasons,
    )
    return msgspec.structs.replace(evidence, device_step=step)
