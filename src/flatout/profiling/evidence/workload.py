"""The fingerprint of the process that is observed."""

from __future__ import annotations

import os
import platform

import torch

from flatout.profiling.calls import Root
from flatout.records.workload import Setting, Workload


def workload_of(
    command: tuple[str, ...],
    cwd: str,
    roots: list[Root],
    optimized: set[int],
    settings: tuple[Setting, ...],
    *,
    is_device: bool,
    world_size: int = 1,
) -> Workload:
    """What ran, with the versions and the number of parameters of all root modules (shared ones counted once)."""
    parameters = {id(p): p for r in roots if (m := r.module()) is not None for p in m.parameters()}
    return Workload(
        command=command,
        cwd=cwd,
        python=platform.python_version(),
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name() if is_device and torch.cuda.is_initialized() else "cpu",
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        world_size=world_size,
        num_parameters=sum(p.numel() for p in parameters.values()),
        trained_parameters=sum(p.numel() for key, p in parameters.items() if key in optimized),
        settings=settings,
    )
