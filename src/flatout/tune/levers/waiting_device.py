"""What levers that capture graphs have in common: a device that waits for its host's launches of always the same kernels."""

from __future__ import annotations

from flatout.core.errors import LeverRefused
from flatout.core.records.evidence import Evidence
from flatout.machine.cost.compiling import has_changing_shapes


def check_device_waits(evidence: Evidence) -> None:
    """Raise LeverRefused where no device waits for launches, or where they are not the same from step to step."""
    if evidence.steps.device_s is None:
        is_there = evidence.workload.device != "cpu"
        raise LeverRefused("what the device does in a step was not traced" if is_there else "no CUDA device")
    if evidence.compilation is not None and evidence.compilation.num_graphs:
        raise LeverRefused("the script compiles; there mode='reduce-overhead' captures graphs")
    if evidence.steps.is_device_bound:
        raise LeverRefused("the device is busy nearly all of the step")
    if has_changing_shapes(evidence):
        raise LeverRefused("shapes change from step to step; a graph has fixed ones")
