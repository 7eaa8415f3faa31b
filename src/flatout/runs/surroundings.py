"""What a run runs in: versions, hardware, threads, and the variables that change numbers or speed."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib.metadata import distributions
from typing import Final

import torch
import torch.distributed as dist

from flatout.records.run import LeftOut, Surroundings
from flatout.runs.secrets import is_secret_name, is_secret_text

_VARIABLES: Final = ("PYTHONHASHSEED", "LD_PRELOAD", "WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_JOB_ID")
_PREFIXES: Final = (
    "OMP_",
    "MKL_",
    "KMP_",
    "GOMP_",
    "OPENBLAS_",
    "CUDA_",
    "CUBLAS",
    "CUDNN_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "MALLOC_",
    "ONEDNN_",
    "DNNL_",
)


def surroundings_here() -> Surroundings:
    """Those of this process."""
    return Surroundings(
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {platform.machine()}",
        driver=str(torch.version.cuda or ""),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_threads=torch.get_num_threads(),
        num_interop_threads=torch.get_num_interop_threads(),
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        environment=allowed(os.environ)[0],
        settings={
            "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
            "float32 products": torch.get_float32_matmul_precision(),
            "default dtype": str(torch.get_default_dtype()),
            "cudnn benchmark": str(torch.backends.cudnn.benchmark),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
        },
        packages=packages(),
    )


def allowed(environment: Mapping[str, str]) -> tuple[dict[str, str], list[LeftOut]]:
    """The variables that are kept, and those that would be, but look like credentials."""
    kept: dict[str, str] = {}
    left_out = []
    for name, value in sorted(environment.items()):
        if name not in _VARIABLES and not name.startswith(_PREFIXES):
            continue
        if is_secret_name(name) or is_secret_text(value):
            left_out.append(LeftOut(name=f"${name}", because="it looks like a credential"))
        else:
            kept[name] = value
    return kept, left_out


def packages() -> dict[str, str]:
    """Name and version of all that is installed; of two with one name, the one that python would import."""
    found: dict[str, str] = {}
    for one in distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return dict(sorted(found.items()))
